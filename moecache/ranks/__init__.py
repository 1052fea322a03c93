"""Experts spread over machines: which rank owns which expert."""

from moecache.ranks._placement import Placement
from moecache.ranks._share import Share

__all__ = ["Placement", "Share"]
