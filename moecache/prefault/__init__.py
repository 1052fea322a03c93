"""Pre-fault: bring a model's pages into memory before the first request needs them."""

from moecache._prefault import touch_pages
from moecache.prefault.background import BackgroundSweep
from moecache.prefault.gate import Verdict, decide
from moecache.prefault.page_cache import Residency, evict, residency
from moecache.prefault.regions import Region, merge
from moecache.prefault.report import Done, PrefaultReport
from moecache.prefault.warming import warm

__all__ = [
    "BackgroundSweep",
    "Done",
    "PrefaultReport",
    "Region",
    "Residency",
    "Verdict",
    "decide",
    "evict",
    "merge",
    "residency",
    "touch_pages",
    "warm",
]
