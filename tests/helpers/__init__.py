"""Helpers of the tests: oracles and small checkpoints."""
