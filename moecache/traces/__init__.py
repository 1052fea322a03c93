"""Recorded routing: what it is, its files, and how a run is recorded."""
