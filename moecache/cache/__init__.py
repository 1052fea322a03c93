"""Which expert is in which slot, and how often each is used."""
