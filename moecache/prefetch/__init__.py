"""What is read before a step asks for it."""
