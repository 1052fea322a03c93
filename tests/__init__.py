"""Tests; one file per module, oracles and doubles in helpers."""
