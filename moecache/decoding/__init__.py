"""The decode step: a token as one call, over experts in slots."""
