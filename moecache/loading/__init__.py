"""Slots filled from a store: the loader, and the engines that read for it."""
