"""Which expert is evicted: the policies, a file per family.

A module registers its policies where it is imported, and this imports them all.
"""

import moecache._slru
import moecache.policies._echo_cache
import moecache.policies._lfu
import moecache.policies._policy
import moecache.policies.replayed  # noqa: F401
