"""Settings: the options of `open`, and every MOECACHE_* variable."""

from moecache.settings.environment import (
    Choice,
    Launched,
    Settings,
    launched_ranks,
    let_idle_threads_sleep,
    ranks_environ,
)
from moecache.settings.option import PREFIX, Option
from moecache.settings.options import (
    COMPUTE,
    DEFAULT_LOADER_THREADS,
    DEFAULT_POLICY,
    DEFAULT_SCOPE,
    DEFAULT_WARMPIN_AFTER,
    OPTIONS,
    POLICIES,
    PREFETCH_MODES,
    READ_MODES,
    markdown_table,
)
from moecache.settings.prefault_modes import DEFAULT_PREFAULT, parse_prefault, prefaults

__all__ = [
    "COMPUTE",
    "DEFAULT_LOADER_THREADS",
    "DEFAULT_POLICY",
    "DEFAULT_PREFAULT",
    "DEFAULT_SCOPE",
    "DEFAULT_WARMPIN_AFTER",
    "OPTIONS",
    "POLICIES",
    "PREFETCH_MODES",
    "PREFIX",
    "READ_MODES",
    "Choice",
    "Launched",
    "Option",
    "Settings",
    "launched_ranks",
    "let_idle_threads_sleep",
    "markdown_table",
    "parse_prefault",
    "prefaults",
    "ranks_environ",
]
