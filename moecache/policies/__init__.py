"""Which expert is evicted: what a cache asks of a policy, a file per family."""
