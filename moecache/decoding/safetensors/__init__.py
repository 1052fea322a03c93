"""Checkpoints of safetensors: what they say of their layers, and their tokens."""
