"""Options: the arguments of `moecache.open` and `moecache.plan`."""

import difflib
import inspect
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, Self, TypeVar

import numpy.typing as npt

from moecache.cuda import parse_device
from moecache.errors import ConfigError
from moecache.policies.making import check_policy
from moecache.prefault.sweep import Progress
from moecache.prefetch.modes import check_prefetch
from moecache.prefetch.predict import Predictor
from moecache.profiles.file import check_path
from moecache.ranks import Share
from moecache.settings import OPTIONS, parse_prefault
from moecache.units import parse_budget

# Options that are counts, and may be 0.
_SIZES = ("context_tokens", "host_bytes", "token_bytes", "state_bytes")


@dataclass(frozen=True)
class Options:
    """The arguments of `moecache.open` beside the path; `None` leaves one to the environment.

    Parameters
    ----------
    memory : int or str, optional
        Bytes for all slots, such as "4GiB", or a share of the experts' own
        bytes, such as "25%". By default MOECACHE_MEMORY, else what is free less
        `reserve`.
    device : str, default "cpu"
        The device of the slots: "cpu", or a GPU, "cuda" or "cuda:1". There `memory` is the GPU's,
        and by default what it has free less `reserve`; where other programs were faster, there
        are fewer slots, and a warning.
    slots : int, optional
        Number of experts to keep, instead of `memory`; staging slots come on top.
    policy : str, class, function or object, optional
        Which expert is evicted, see `ExpertCache`: a name, or a policy of your own. By default
        MOECACHE_POLICY, else "echo".
    scope : {"global", "layer"}, optional
        Whether layers share the slots. By default MOECACHE_SCOPE, else "global".
    dtype : numpy dtype, optional
        Convert experts to it as they are read. By default slots hold what the
        file holds, and on a GPU always.
    top_k : int, optional
        Experts per token, if config.json does not say.
    read : {"auto", "direct", "buffered", "mmap"}, optional
        How experts are read: around the page cache (for models larger than
        memory: nothing is in memory twice), through it, or copied from the mapped
        file. "auto": through the page cache if all experts fit into the memory
        that slots, trunk and KV cache leave; else direct. By default
        MOECACHE_READ, else "auto".
    reserve : int or str, optional
        Memory that a plan without `memory` leaves free. By default MOECACHE_RESERVE,
        else the bytes of all other tensors, a KV cache of up to 4,096 tokens, the
        buffers of the reads, and something to spare: a sixteenth of what is free, 32 to
        512 MiB of it; on a GPU 512 MiB.
    lock : bool, optional
        Keep the slots from being swapped out (mlock). By default MOECACHE_LOCK,
        else False.
    profile : str or Path, optional
        A file that keeps what is found out about the disk, so that the next start
        need not measure it, and how experts were used, so that it starts warm: free
        slots are filled in the background (`runtime.warm_start`) before a request asks.
        Written on `close`. A file that cannot be used is a warning. By default
        MOECACHE_PROFILE, else none.
    loader_threads : int, optional
        Threads that read; with io_uring, one or none that helps with long
        prompts. By default MOECACHE_LOADER_THREADS, else 2; where direct reads
        find no io_uring, 8; for slots on a GPU that are read through the page cache, the
        cores that the process may use, 12 at most.
    prefetch : {"auto", "echo", "last", "hints", "off"} or Predictor, optional
        Which experts are read before their layer asks for them: those that ECHO
        foresees, those of the last token, those that `runtime.hint` names, or those of
        an object that predicts. "auto": as "echo", as long as tokens are faster with it
        than without, which is tried from time to time; the report says what was found.
        By default MOECACHE_PREFETCH, else "auto".
    prefault : {"auto", "background", "off", "force"}, optional
        Back the slots with memory, and bring the experts' part of the file into
        the page cache, so that no request waits for page faults. "force": all of
        it, before this returns. "background": as much of the file as fits beside
        the slots, while the host goes on; `runtime.prefault` says how far it is.
        "auto": all of it before this returns if every expert has a slot and it
        fits, else as "background". With direct reads the file is left alone. By
        default MOECACHE_PREFAULT, else "auto". It never makes `open` fail.
    progress : callable (done_bytes, total_bytes), optional
        Called some ten times a second while the pre-fault goes on.
    record_trace : str or Path, optional
        A file for the router's choices, written on `close`: at most 256 MiB of them. See
        `ExpertRuntime.record_trace`, which can be given more memory (`max_bytes=`). By
        default MOECACHE_RECORD_TRACE, else nothing is recorded.
    warmpin : int or "auto", optional
        Experts of each layer that are pinned, once, after `warmpin_after` accesses: the most
        used ones that are resident then, the busiest layers' first, at most half the cache.
        0: none. "auto": as many as a token uses, unless everything fits; none with the
        policies "echo" and "haz2". By default MOECACHE_WARMPIN, else "auto".
    warmpin_after : int, optional
        Accesses, hits and misses together, that are counted before `warmpin` pins; 0 and up.
        By default MOECACHE_WARMPIN_AFTER, else 512.
    layers : collection of str, optional
        Names of the MoE layers that run, if the checkpoint has others too; see
        `open_store`.
    context_tokens : int, optional
        Tokens of the KV cache that a plan without `memory` leaves room for; by default as
        many as the model takes, at most 4,096.
    host_bytes : int, optional
        Bytes that the host will still take for trunk, products and prompts. A plan without `memory`
        and `reserve` leaves them free; by default the trunk's bytes, as stored. Give 0 if the
        trunk is in memory already.
    token_bytes : int, optional
        Bytes of a token's keys and values in that cache; by default as the checkpoint's config.json
        says.
    state_bytes : int, optional
        Bytes of the states of a text, which layers of linear attention and the like have instead;
        likewise.
    makes_room : bool, default False
        Whether the host calls `ExpertRuntime.make_room` before its KV cache takes memory. Slots in
        RAM then have what a plan without `memory` and `reserve` keeps for the cache, all but its
        first 512 tokens, until it is asked for.
    share : Share, optional
        The experts that this process has, if others have the rest: slots, reads, pre-fault and
        what is kept in a profile are of these alone, and a step's other ids are dropped. Shares of
        memory are of these experts' bytes.

    Raises
    ------
    ConfigError
        If an option cannot be used.
    """

    memory: int | str | None = None
    device: str = "cpu"
    slots: int | None = None
    policy: Any = None
    scope: str | None = None
    dtype: npt.DTypeLike | None = None
    top_k: int | None = None
    read: str | None = None
    reserve: int | str | None = None
    lock: bool | None = None
    profile: str | os.PathLike[str] | None = None
    loader_threads: int | None = None
    prefetch: str | Predictor | None = None
    prefault: str | None = None
    progress: Progress | None = None
    record_trace: str | os.PathLike[str] | None = None
    warmpin: int | str | None = None
    warmpin_after: int | None = None
    layers: Collection[str] | None = None
    context_tokens: int | None = None
    host_bytes: int | None = None
    token_bytes: int | None = None
    state_bytes: int | None = None
    makes_room: bool = False
    share: Share | None = None

    @classmethod
    def of(
        cls, options: "Options | None" = None, *, memory: Any, device: str, **keywords: Any
    ) -> Self:
        """Return the options that a call was given: as one object, or one by one.

        Raises
        ------
        ConfigError
            If it was given both.
        TypeError
            If there is no such option.
        """
        known = [field.name for field in fields(cls)]
        for name in keywords:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"there is no option {name!r}{hint}")
        if options is None:
            return cls(memory=memory, device=device, **keywords)
        if keywords or memory is not None or device != "cpu":
            raise ConfigError("give either options or keywords, not both")
        assert isinstance(options, cls)
        return options

    def __post_init__(self) -> None:
        """Refuse what cannot be used, before anything is opened."""
        for name in ("lock", "prefault", "prefetch", "warmpin"):
            if isinstance(text := getattr(self, name), str):
                object.__setattr__(self, name, OPTIONS[name].read(text))
        if self.prefault is not None:
            parse_prefault(self.prefault)
        if self.profile is not None:
            check_path(self.profile)
        if self.policy is not None:
            check_policy(self.policy)
        if self.lock not in (None, True, False):
            raise ConfigError(f"lock must be True or False, got {self.lock!r}")
        if self.memory is not None:
            parse_budget(self.memory, 0)
        if self.read is not None:
            OPTIONS["read"].check(self.read)
        if self.record_trace is not None and not isinstance(self.record_trace, str | os.PathLike):
            raise ConfigError(f"record_trace must be a path, got {self.record_trace!r}")
        on_gpu = parse_device(self.device) is not None
        if self.slots is not None and self.memory is not None:
            raise ConfigError("give either memory or slots, not both")
        for name in ("slots", "loader_threads", "top_k", *_SIZES):
            value: Any = getattr(self, name)
            if value is not None and (not isinstance(value, Integral) or isinstance(value, bool)):
                raise ConfigError(f"{name} must be a whole number, got {value!r}")
            object.__setattr__(self, name, None if value is None else int(value))
        if self.share is not None and not isinstance(self.share, Share):
            raise ConfigError(f"share must be a moecache.ranks.Share, got {self.share!r}")
        if self.slots is not None and self.slots < 1:
            raise ConfigError(f"slots must be at least 1, got {self.slots}")
        for name in _SIZES:
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.progress is not None and not callable(self.progress):
            raise ConfigError(f"progress must be callable, got {self.progress!r}")
        if self.prefetch is not None:
            check_prefetch(self.prefetch)
        if on_gpu and self.dtype is not None:
            raise ConfigError(f"slots on {self.device} hold what the file holds; leave dtype out")
        if on_gpu and self.lock:
            raise ConfigError(f"slots on {self.device} are never swapped out; leave lock out")


_Call = TypeVar("_Call", bound=Callable[..., Any])


def takes_options(call: _Call) -> _Call:
    """Show every option in the signature of a function that takes them as keywords."""
    shown = inspect.signature(call)
    named = [one for one in shown.parameters.values() if one.kind is not one.VAR_KEYWORD]
    known = {one.name for one in named}
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=field.type,
        )
        for field in fields(Options)
        if field.name not in known
    ]
    call.__signature__ = shown.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return call
