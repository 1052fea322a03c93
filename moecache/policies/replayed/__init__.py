"""Policies to compare with, in replays: ECHO, the default, hits more often at every size."""

import moecache.policies.replayed._arc
import moecache.policies.replayed._fifo
import moecache.policies.replayed._lecar
import moecache.policies.replayed._lrfu
import moecache.policies.replayed._stale
import moecache.policies.replayed._tinylfu  # noqa: F401
