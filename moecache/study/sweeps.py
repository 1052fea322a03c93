"""Sweeps: many policies, capacities and traces at once."""

import logging
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from moecache.errors import CapacityError, ConfigError, SweepError
from moecache.policies.making import policy_name
from moecache.study._arguments import (
    BELADY,
    check_factory,
    check_name,
    check_scope,
    clip_capacity,
    total_experts,
)
from moecache.study._identity import identify
from moecache.study._journal import Journal
from moecache.study._progress import Progress, Reporter
from moecache.study._workers import (
    Cell,
    Figures,
    Outcome,
    can_be_sent,
    run_cluster,
    run_here,
    run_processes,
    said,
)
from moecache.study.importers import load_any
from moecache.study.table import Table
from moecache.traces.trace import Trace

logger = logging.getLogger(__name__)

# A process takes half a second to start; a visit of a layer one or two microseconds.
_POOL_VISITS = 2_000_000

TraceLike = Trace | str | os.PathLike[str]


def sweep(
    traces: TraceLike | Sequence[TraceLike] | Mapping[str, TraceLike],
    policies: Sequence[Any] | Callable[..., Any] | str = ("lru", "echo", BELADY),
    capacities: Sequence[float | str] | float | str = ("12.5%", "25%", "50%"),
    *,
    scopes: Sequence[str] | str = ("global",),
    processes: int | None = None,
    cluster: Any = None,
    resume: str | os.PathLike[str] | None = None,
    progress: bool | Progress = False,
) -> Table:
    """Replay every trace with every policy, scope and capacity.

    Parameters
    ----------
    traces : mapping of names to traces or files; or some of them, or one
        Files of any form that `load_any` knows. Without names, a file's own.
    policies : names, classes or functions; or one
        As for `replay`, but no single object, because its state would go from one
        cell to the next.
    capacities : slots, or shares of all experts
    scopes : "global" and "layer"
    processes : int, optional
        How many work side by side; 0 and 1 are this one alone. By default as many as
        there are processors, and this one alone for what is done in a moment, or
        if a policy cannot be sent to others. In a script, a sweep with
        processes must stand below ``if __name__ == "__main__":``.
    cluster : str or dask.distributed.Client, optional
        Work on a Dask cluster instead: a scheduler's address, or a client. The workers
        need this version of moecache. Needs the extra `study`.
    resume : path, optional
        A file that keeps finished cells, and gives them to the next sweep that asks for the
        same: by the trace's routing, policy, scope, slots and version of moecache.
        A class or function of a module counts as the same while its source is, and that of its
        base classes; the code that it calls is not looked at. A partial counts by its function
        and arguments, if these are plain values. Methods, lambdas and what is made in a function
        are replayed every time; a warning in the log names them. Made if need be; a sweep may be
        killed at any time. If there is no space left for it, the sweep goes on without, and
        warns of that, too.
    progress : bool or callable (done, total), default False
        True shows a bar on standard error.

    Returns
    -------
    Table
        By trace, scope, capacity and policy, in the order they were given. Capacities
        that come to the same number of slots are one.

    Raises
    ------
    SweepError
        If cells failed, once all others are done; these are in its `table`.
    ConfigError
        If an argument cannot be used; nothing was replayed then.
    FormatError
        If a trace, or the file to resume from, is damaged.
    MissingDependencyError
        If `cluster` is given and Dask is not installed.
    """
    if cluster is not None and processes is not None:
        raise ConfigError("give processes or a cluster, not both")
    processes = _whole(processes)
    named = _named_policies(policies)
    found = {name: _load(trace) for name, trace in _named_traces(traces).items()}
    shares = _several("capacities", capacities, (str, int, float, np.number))
    chosen = _several("scopes", scopes, (str,))
    for scope in chosen:
        check_scope(scope)
    cells, failures = _plan(found, named, shares, chosen)
    outcomes: dict[int, Figures] = {}
    with ExitStack() as stack:
        journal = None if resume is None else stack.enter_context(Journal(resume))
        digests = {name: trace.digest for name, trace in found.items()} if journal else {}
        known_as = {label: identify(policy) for label, policy in named.items()} if journal else {}
        keys = [_key(cell, digests, known_as) for cell in cells] if journal else []
        if journal:
            _warn(cells, keys)
            known = {number: journal.found.get(key) for number, key in enumerate(keys) if key}
            outcomes = {number: figures for number, figures in known.items() if figures}
        rest = [number for number in range(len(cells)) if number not in outcomes]
        report = stack.enter_context(Reporter(progress, len(cells)))
        report(len(outcomes))
        todo = [cells[number] for number in rest]
        for place, outcome in _run(todo, found, processes, cluster):
            number = rest[place]
            if isinstance(outcome, Exception):
                failures.append((_coordinates(cells[number]), outcome))
            else:
                outcomes[number] = outcome
                if journal and keys[number]:
                    journal.add(keys[number], outcome)
            report(len(outcomes))
    table = Table(_rows(cells, outcomes, found))
    if failures:
        given = "" if resume else "with resume= given from the start, "
        remedy = f"error.table has the others; {given}the same call repeats only what failed"
        raise sweep_error(table, failures, remedy) from failures[0][1]
    return table


def sweep_error(
    table: Table, failures: list[tuple[dict[str, Any], Exception]], remedy: str
) -> SweepError:
    """Return the error that says what failed first, and what to do."""
    where, error = failures[0]
    spot = ", ".join(f"{name} {value!r}" for name, value in where.items())
    return SweepError(
        f"{len(table)} replays succeeded, {len(failures)} failed; the first with {spot}: "
        f"{said(error)}; {remedy}",
        table,
        failures,
    )


def _run(
    cells: list[Cell], traces: Mapping[str, Trace], processes: int | None, cluster: Any
) -> Iterator[tuple[int, Outcome]]:
    if cluster is not None:
        return run_cluster(cells, traces, cluster)
    if processes is None:
        visits = sum(
            traces[cell.trace].num_tokens * traces[cell.trace].num_layers for cell in cells
        )
        worth = visits >= _POOL_VISITS and can_be_sent([cell.policy for cell in cells])
        processes = (os.cpu_count() or 1) if worth else 1
    processes = min(processes, len(cells))
    if processes <= 1:
        return run_here(cells, traces)
    return run_processes(cells, traces, processes)


def _plan(
    traces: Mapping[str, Trace],
    policies: Mapping[str, Any],
    capacities: Iterable[float | str],
    scopes: Iterable[str],
) -> tuple[list[Cell], list[tuple[dict[str, Any], Exception]]]:
    cells: dict[tuple[str, str, int, str], Cell] = {}
    failures: list[tuple[dict[str, Any], Exception]] = []
    capacities = list(capacities)
    for name, trace in traces.items():
        for scope in scopes:
            for capacity in capacities:
                try:
                    slots = clip_capacity(capacity, trace, scope)
                except CapacityError as error:
                    where = {"trace": name, "scope": scope, "capacity": capacity}
                    failures.append((where, error))
                    continue
                for label, policy in policies.items():
                    cells.setdefault((name, scope, slots, label), Cell(name, policy, scope, slots))
    return list(cells.values()), failures


def _coordinates(cell: Cell) -> dict[str, Any]:
    return {
        "trace": cell.trace,
        "policy": policy_name(cell.policy),
        "scope": cell.scope,
        "capacity": cell.slots,
    }


def _rows(
    cells: Sequence[Cell], outcomes: Mapping[int, Figures], traces: Mapping[str, Trace]
) -> Iterator[dict[str, Any]]:
    rates = {
        (cell.trace, cell.scope, cell.slots, cell.policy): _rate(outcomes[number])
        for number, cell in enumerate(cells)
        if number in outcomes and cell.policy in ("lru", BELADY)
    }
    for number, cell in enumerate(cells):
        if number not in outcomes:
            continue
        figures, trace = outcomes[number], traces[cell.trace]
        rate = _rate(figures)
        low = rates.get((cell.trace, cell.scope, cell.slots, "lru"))
        high = rates.get((cell.trace, cell.scope, cell.slots, BELADY))
        gap = None
        if low is not None and high is not None and low != high:
            gap = (rate - low) / (high - low)
        yield {
            **_coordinates(cell),
            "model": trace.metadata.get("model"),
            "fraction": cell.slots / total_experts(trace),
            **figures,
            "hit_rate": rate,
            "miss_ratio": 1 - rate,
            "gap_share": gap,
            "per_layer": [
                hits / (hits + misses) if hits else 0.0
                for hits, misses in zip(figures["layer_hits"], figures["layer_misses"], strict=True)
            ],
        }


def _rate(figures: Figures) -> float:
    accesses = figures["num_accesses"]
    return figures["num_hits"] / accesses if accesses else 0.0


def _named_policies(policies: Sequence[Any] | Callable[..., Any] | str) -> dict[str, Any]:
    chosen = [policies] if callable(policies) else _several("policies", policies, (str,))
    named: dict[str, Any] = {}
    for policy in chosen:
        if isinstance(policy, str):
            check_name(policy)
        else:
            check_factory(policy, "a sweep")
        name = policy_name(policy)
        if named.setdefault(name, policy) is not policy and named[name] != policy:
            raise ConfigError(f"two policies are called {name!r}; give one another __name__")
    if not named:
        raise ConfigError("a sweep needs at least one policy")
    return named


def _named_traces(
    traces: TraceLike | Sequence[TraceLike] | Mapping[str, TraceLike],
) -> dict[str, TraceLike]:
    if isinstance(traces, Mapping):
        named = dict(traces)
    else:
        several = _several("traces", traces, (Trace, str, os.PathLike))
        named = {}
        for number, trace in enumerate(several):
            name = (
                str(trace.metadata.get("model", f"trace {number}"))
                if isinstance(trace, Trace)
                else Path(trace).name.partition(".")[0]
            )
            if name in named:
                name = f"trace {number}" if isinstance(trace, Trace) else os.fspath(trace)
            if name in named:
                raise ConfigError(f"trace {name!r} is there twice")
            named[name] = trace
    if not named:
        raise ConfigError("a sweep needs at least one trace")
    return named


def _several(name: str, given: Any, one: tuple[type, ...]) -> list[Any]:
    """Return a list of what was given, one or several."""
    if isinstance(given, one):
        return [given]
    try:
        return list(given)
    except TypeError as error:
        kinds = ", ".join(kind.__name__ for kind in one)
        raise ConfigError(f"{name} must be one or several of {kinds}, got {given!r}") from error


def _whole(processes: Any) -> int | None:
    if processes is None:
        return None
    try:
        number = -1 if isinstance(processes, bool) else operator.index(processes)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"processes must be 0 or more, got {processes!r}")
    return number


def _load(trace: TraceLike) -> Trace:
    return trace if isinstance(trace, Trace) else load_any(trace)


def _key(cell: Cell, digests: Mapping[str, str], known_as: Mapping[str, str]) -> str:
    """Return what a cell's result depends on, or "" if that cannot be told."""
    from moecache import __version__

    policy = known_as[policy_name(cell.policy)]
    digest = digests[cell.trace]
    return f"{digest} {policy} {cell.scope} {cell.slots} {__version__}" if policy else ""


def _warn(cells: Sequence[Cell], keys: Sequence[str]) -> None:
    lost = [policy_name(cell.policy) for cell, key in zip(cells, keys, strict=True) if not key]
    if lost:
        logger.warning(
            "sweep.not_kept policies=%s cells=%d: they are replayed again next time; take classes "
            "and functions of a module",
            ",".join(dict.fromkeys(lost)),
            len(lost),
        )
