"""GGUF files' models: what they say of their layers, and their tokens."""
