"""moecache: run mixture-of-experts models larger than your memory."""

import importlib
import typing

from moecache.commands import ctrl_c as _ctrl_c

# The imports of a command take long enough to be interrupted.
if _ctrl_c.IS_COMMAND:
    _ctrl_c.CTRL_C.stay()

from moecache import compute, errors, prefault, sizing, telemetry, units
from moecache._slru import SlruCache
from moecache.cache._cache import ExpertCache
from moecache.cache._profiler import AccessProfiler
from moecache.compute import experts
from moecache.errors import (
    CapacityError,
    ConfigError,
    ExpertNotFoundError,
    FormatError,
    MissingDependencyError,
    MoeCacheError,
    StoreError,
    SweepError,
)
from moecache.layout import ExpertLayout, Role
from moecache.policies._echo import Echo
from moecache.policies._echo_cache import EchoCache
from moecache.policies._lfu import LfruCache, LfuCache
from moecache.policies._policy import LruCache
from moecache.policies.replayed._arc import ArcCache
from moecache.policies.replayed._fifo import FifoCache, S3FifoCache, SieveCache
from moecache.policies.replayed._lecar import LecarCache
from moecache.policies.replayed._lrfu import LrfuCache
from moecache.policies.replayed._stale import LeastStaleCache
from moecache.policies.replayed._tinylfu import WTinyLfuCache
from moecache.prefetch.predict import Frequency, LastSelection, Predictor
from moecache.reader._reader import Reader
from moecache.reader.disk import DiskSpeed, open_reader
from moecache.runtime.open import open  # noqa: A004 - moecache.open
from moecache.runtime.options import Options
from moecache.runtime.plan import Plan, plan
from moecache.runtime.runtime import ExpertRuntime
from moecache.runtime.steps import Lease, Wave
from moecache.slots import CudaSlots, HostSlots, SlotPool
from moecache.stores import (
    CheckpointStore,
    ExpertStore,
    FileStore,
    GgufStore,
    MemoryStore,
    SafetensorsStore,
    open_store,
)
from moecache.telemetry import PrefetchStats, ReadingStats, RuntimeStats, UploadStats

if typing.TYPE_CHECKING:
    from moecache import study

__version__ = "0.1.0"

__all__ = [
    "AccessProfiler",
    "ArcCache",
    "CapacityError",
    "CheckpointStore",
    "ConfigError",
    "CudaSlots",
    "DiskSpeed",
    "Echo",
    "EchoCache",
    "ExpertCache",
    "ExpertLayout",
    "ExpertNotFoundError",
    "ExpertRuntime",
    "ExpertStore",
    "FifoCache",
    "FileStore",
    "FormatError",
    "Frequency",
    "GgufStore",
    "HostSlots",
    "LastSelection",
    "Lease",
    "LeastStaleCache",
    "LecarCache",
    "LfruCache",
    "LfuCache",
    "LrfuCache",
    "LruCache",
    "MemoryStore",
    "MissingDependencyError",
    "MoeCacheError",
    "Options",
    "Plan",
    "Predictor",
    "PrefetchStats",
    "Reader",
    "ReadingStats",
    "Role",
    "RuntimeStats",
    "S3FifoCache",
    "SafetensorsStore",
    "SieveCache",
    "SlotPool",
    "SlruCache",
    "StoreError",
    "SweepError",
    "UploadStats",
    "WTinyLfuCache",
    "Wave",
    "compute",
    "errors",
    "experts",
    "open",
    "open_reader",
    "open_store",
    "plan",
    "prefault",
    "sizing",
    "study",
    "telemetry",
    "units",
]

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # The study takes a fifth of the package's import time, and few processes use it.
        if name == "study":
            return importlib.import_module("moecache.study")
        raise AttributeError(f"module 'moecache' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "study"})


# `moecache.__main__` catches it again: a program of the same name that imports this keeps its own.
_ctrl_c.CTRL_C.release()
