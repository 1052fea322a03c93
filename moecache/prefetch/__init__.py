"""Experts that are read before a step asks for them."""
