"""Findings of earlier runs in a file, and their use."""
