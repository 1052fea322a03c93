"""Ways to decode the same tokens, in turns: what each did, and whether the bits agree."""

import gc
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from bench.gpu import turns
from bench.gpu_copies import DeviceCopy, PinnedCopy, Timer
from bench.gpu_stack import Decoder, Place, check_bits, open_stack
from moecache import ExpertRuntime, RuntimeStats
from moecache.errors import MoeCacheError


@dataclass(frozen=True)
class Way:
    """A way to decode: the share of the experts that have slots (0: one slot), and how."""

    name: str
    share: float
    policy: str
    prefetch: str = "off"
    kind: type[Decoder] = Decoder


class Row:
    """What one way did, run by run."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.runs: list[dict[str, float]] = []

    def run(self, tokens: Sequence[int], link_bytes_per_s: float) -> None:
        """Decode some tokens, and note what that took."""
        made, seconds = self._decode(tokens)
        copied = 0 if made.uploads is None else made.uploads.bytes_uploaded
        self.runs.append(
            {
                "tokens": len(tokens),
                "tokens_per_s": len(tokens) / seconds,
                "bytes_per_token": copied / len(tokens),
                "link_bytes_per_s": link_bytes_per_s,
                "of_link": copied / link_bytes_per_s / seconds,
                "stall_ns_per_token": made.stall_ns / len(tokens),
                "hits": made.num_hits,
                "misses": made.num_misses,
            }
        )

    def figures(self, resident: "Row") -> dict[str, Any]:
        """Return medians over the runs, and what each run did."""
        hits, misses = (sum(run[key] for run in self.runs) for key in ("hits", "misses"))
        prefetch = self.decoder.runtime.stats().prefetch
        keys = ("active", "reason", "num_issued", "num_useful")
        return {
            **self._medians("tokens_per_s", "of_link", "bytes_per_token", "stall_ns_per_token"),
            "of_resident": self._share_of(resident),
            "hit_rate": hits / (hits + misses) if hits + misses else 1.0,
            "misses_per_token": misses / sum(run["tokens"] for run in self.runs),
            "prefetch": prefetch and {key: getattr(prefetch, key) for key in keys},
            "runs": self.runs,
        }

    def _decode(self, tokens: Sequence[int]) -> tuple[RuntimeStats, float]:
        """Decode some tokens, one after the other; return what was counted, and the seconds."""
        decoder, runtime = self.decoder, self.decoder.runtime
        before = runtime.stats()
        start = time.perf_counter()
        for token in tokens:
            decoder.step(token)
        decoder.finish()
        seconds = time.perf_counter() - start
        return runtime.stats() - before, seconds

    def _medians(self, *keys: str) -> dict[str, float]:
        return {key: statistics.median(run[key] for run in self.runs) for key in keys}

    def _share_of(self, resident: "Row") -> float:
        """Return the median over the runs of its rate as a share of another's."""
        pairs = zip(self.runs, resident.runs, strict=True)
        return statistics.median(
            run["tokens_per_s"] / other["tokens_per_s"] for run, other in pairs
        )


class LayerRow(Row):
    """What one way did, and what a layer took on the device and on the host."""

    def __init__(self, decoder: Decoder, place: Place, timer: Timer) -> None:
        super().__init__(decoder)
        self._num_layers = place.inputs.size.num_layers
        self._timer = timer

    def run(self, tokens: Sequence[int], link_bytes_per_s: float) -> None:
        """Decode some tokens, and then each again; note the medians over them."""
        del link_bytes_per_s
        stalls = self.decoder.num_stalls
        made, seconds = self._decode(tokens)
        stalls = self.decoder.num_stalls - stalls
        computed, issued = zip(*map(self._time, tokens), strict=True)
        asked = made.num_hits + made.num_misses
        self.runs.append(
            {
                "tokens_per_s": len(tokens) / seconds,
                "hit_rate": made.num_hits / asked if asked else 1.0,
                "stalls_per_token": stalls / len(tokens),
                "stall_ns_per_token": made.stall_ns / len(tokens),
                "host_us_per_layer": statistics.median(issued) / 1e3 / self._num_layers,
                "device_us_per_layer": statistics.median(computed) / 1e3 / self._num_layers,
            }
        )

    def figures(self, resident: Row) -> dict[str, Any]:
        """Return medians over the runs, and what each run did."""
        of_resident = self._share_of(resident)
        return {**self._medians(*self.runs[0]), "of_resident": of_resident, "runs": self.runs}

    def _time(self, token: int) -> tuple[int, int]:
        """Return what a token's layers take on the device, and on the host right after that."""
        return self.decoder.device_ns(token, self._timer), self.decoder.host_ns()


@dataclass
class Contest:
    """Ways to decode the same tokens, which run in turns and must leave the same bits."""

    place: Place
    copy: PinnedCopy | DeviceCopy
    num_runs: int
    num_tokens: int
    loader_threads: int = 8
    timer: Timer | None = None
    expected: dict[int, str] = field(default_factory=dict)
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)

    def run(self, always: Sequence[Decoder], ways: Sequence[Way]) -> None:
        """Run some ways beside those always there, the first of which has everything resident."""
        self._run(always, ways)
        # A device's memory is free when nothing refers to it.
        gc.collect()

    def _run(self, always: Sequence[Decoder], ways: Sequence[Way]) -> None:
        rows = [self._row(decoder) for decoder in always]
        with ExitStack() as opened:
            for way in ways:
                try:
                    decoder = opened.enter_context(self._open(way, always[0].runtime, opened))
                except (MoeCacheError, MemoryError) as error:
                    self.refused[way.name] = str(error)
                    continue
                # Warms its cache, too.
                verify(decoder, self.expected)
                rows.append(self._row(decoder))
            for run in range(self.num_runs):
                start, known = run * self.num_tokens, self.place.inputs.num_tokens
                tokens = [(start + i) % known for i in range(self.num_tokens)]
                self.rates.append(self.copy.bytes_per_s())
                for row in turns(rows, run):
                    row.run(tokens, self.rates[-1])
                    check_bits(row.decoder, tokens[-1], self.expected)
            figures = {row.decoder.name: row.figures(rows[0]) for row in rows}
        # In place: it is what an interrupt leaves.
        self.found |= {**figures, **self.found}

    def _row(self, decoder: Decoder) -> Row:
        return LayerRow(decoder, self.place, self.timer) if self.timer else Row(decoder)

    def _open(self, way: Way, resident: ExpertRuntime, opened: ExitStack) -> Decoder:
        """Return a way's decoder, whose runtime is closed with what was opened."""
        runtime, size = resident, self.place.inputs.size
        if way.share < 1:
            capacity = max(1, int(way.share * size.num_layers * size.num_experts))
            runtime = opened.enter_context(
                open_stack(
                    self.place.device,
                    size,
                    capacity,
                    policy=way.policy,
                    prefetch=way.prefetch,
                    loader_threads=self.loader_threads,
                )
            )
        return way.kind(way.name, self.place, runtime)


def verify(decoder: Decoder, expected: dict[int, str]) -> None:
    """Compute every token and compare its bits."""
    for token in range(decoder.num_tokens):
        decoder.step(token)
        check_bits(decoder, token, expected)
