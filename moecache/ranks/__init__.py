"""Experts spread over machines: which rank owns which expert."""

from moecache.ranks._placement import Placement

__all__ = ["Placement"]
