"""Machine: the figures of a machine that is simulated, checked."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Self, TypeVar

from moecache.errors import ConfigError
from moecache.layout import ExpertLayout
from moecache.sizing.planning import num_staging_slots
from moecache.study._arguments import POLICIES, clip_capacity, total_experts
from moecache.study._simulation import SimulatedHost
from moecache.study.advice import expert_size
from moecache.traces.trace import Trace
from moecache.units import format_bytes, format_bytes_per_s, format_ns, parse_bytes_per_s, parse_ns

PREFETCH_MODES = ("off", "echo", "last", "auto")
DEFAULT_BANDWIDTH = "25GB/s"
DEFAULT_COMPUTE_NS = 150_000
DEFAULT_EXPERT_SHARE = 0.5
# A hundred thousand seconds: sums of them are counted in 64 bits.
MAX_NS = 10**14
MAX_EXPERT_BYTES = 2**50
MAX_STAGING_SLOTS = 65_536

_Given = TypeVar("_Given")
_Parsed = TypeVar("_Parsed")


@dataclass(frozen=True)
class Machine:
    """The simulated machine, as `simulate_time` describes it.

    Attributes
    ----------
    policy, scope, prefetch : str
    capacity, staging_slots : int
        Slots of the cache, and beside it.
    bandwidth : float
        Bytes per second.
    latency_ns, compute_ns : int
    expert_share : float
    expert_bytes : int
    """

    policy: str
    scope: str
    prefetch: str
    capacity: int
    staging_slots: int
    bandwidth: float
    latency_ns: int
    compute_ns: int
    expert_share: float
    expert_bytes: int

    @classmethod
    def parse(
        cls,
        trace: Trace,
        policy: str,
        prefetch: str,
        *,
        capacity: float | str,
        bandwidth: float | str,
        latency_ns: int | str,
        compute_ns: int | str,
        expert_share: float,
        expert_bytes: int | str | None,
        scope: str,
        staging_slots: int | None,
        max_slots: int | None = None,
    ) -> Self:
        """Return a machine from the arguments of `simulate_time`.

        Parameters
        ----------
        max_slots : int, optional
            Experts that there are for it; more slots are not made. By default the trace's.

        Raises
        ------
        CapacityError
            If there are no slots, or fewer than layers with scope "layer".
        ConfigError
            If an argument cannot be used, or an expert's size is not known.
        """
        if policy not in POLICIES:
            raise ConfigError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
        if prefetch not in PREFETCH_MODES:
            raise ConfigError(f"prefetch {prefetch!r} is not one of {', '.join(PREFETCH_MODES)}")
        if not isinstance(expert_share, Real) or not 0 <= expert_share <= 1:
            raise ConfigError(f"expert_share must be in [0, 1], got {shown(expert_share)}")
        if staging_slots is not None and not (
            isinstance(staging_slots, Integral) and 1 <= staging_slots <= MAX_STAGING_SLOTS
        ):
            raise ConfigError(
                f"staging_slots must be an int from 1 to {MAX_STAGING_SLOTS:,}, "
                f"got {shown(staging_slots)}"
            )
        slots = clip_capacity(capacity, trace, scope)
        if max_slots is not None:
            slots = min(slots, max_slots)
        nbytes = parse("expert_bytes", lambda given: expert_size(trace, given), expert_bytes)
        rate = parse("bandwidth", parse_bytes_per_s, bandwidth)
        latency_ns = parse("latency_ns", parse_ns, latency_ns)
        compute_ns = parse("compute_ns", parse_ns, compute_ns)
        _check_times(nbytes, rate, latency_ns=latency_ns, compute_ns=compute_ns)
        if staging_slots is None:
            staging_slots = num_staging_slots(trace.top_k, slots)
        return cls(
            policy=policy,
            scope=scope,
            prefetch=prefetch,
            capacity=slots,
            staging_slots=staging_slots,
            bandwidth=rate,
            latency_ns=latency_ns,
            compute_ns=compute_ns,
            expert_share=expert_share,
            expert_bytes=nbytes,
        )

    def host(self, trace: Trace) -> SimulatedHost:
        """Return a host loop on it, for the experts of a trace's model."""
        layout = ExpertLayout.uniform(
            num_layers=trace.num_layers,
            num_experts=trace.num_experts,
            top_k=trace.top_k,
            expert_bytes=self.expert_bytes,
        )
        return SimulatedHost(
            layout,
            slots=self.capacity,
            staging_slots=self.staging_slots,
            policy=self.policy,
            scope=self.scope,
            bandwidth=self.bandwidth,
            latency_ns=self.latency_ns,
            prefetch=self.prefetch,
        )


def parse(name: str, parser: Callable[[_Given], _Parsed], given: _Given) -> _Parsed:
    """Return what a parser makes of an argument, whose name is in every error."""
    try:
        return parser(given)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if name in text else f"{name}: {text}") from error


def known_expert_bytes(trace: Trace, given: int | None) -> int:
    """Return the bytes of an expert: those that are given, what the trace says, or 0.

    Raises
    ------
    ConfigError
        If no expert is as large, or `trace` is no Trace.
    """
    total_experts(trace)  # which says how to read a file's
    said = trace.metadata.get("expert_bytes") if given is None else given
    if not isinstance(said, int) or said <= 0:
        return 0
    _check_expert_bytes(said)
    return said


def shown(value: Any) -> str:
    """Return what was given, for an error."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # an int of more digits than Python writes
        return "an endless number"


def _check_expert_bytes(nbytes: int) -> None:
    if nbytes > MAX_EXPERT_BYTES:
        raise ConfigError(
            f"expert_bytes must be from 1 to 2**50 ({format_bytes(MAX_EXPERT_BYTES)}), "
            f"got {shown(nbytes)}"
        )


def _check_times(nbytes: int, rate: float, **times_ns: int) -> None:
    """Refuse what would take so long that the clock's figures overflow."""
    for name, ns in times_ns.items():
        if ns > MAX_NS:
            raise ConfigError(
                f"{name} must be from 0 to 10**14 ({format_ns(MAX_NS)}), got {shown(ns)}"
            )
    _check_expert_bytes(nbytes)
    if nbytes * 10**9 > MAX_NS * rate:
        raise ConfigError(
            f"bandwidth must be at least {format_bytes_per_s(nbytes * 1e9 / MAX_NS)} for experts "
            f"of {format_bytes(nbytes)}, got {format_bytes_per_s(rate)}: one would take more than "
            f"{format_ns(MAX_NS)}"
        )
