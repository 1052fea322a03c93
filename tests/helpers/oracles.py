"""Plain-Python versions of the policies and of the cache, written to be read, not to be fast."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moecache.errors import CapacityError
from moecache.policies._echo import Echo
from tests.helpers.oracle_echo import EchoValues, OracleEchoCache
from tests.helpers.oracle_ghosts import OracleArc, OracleLecar
from tests.helpers.oracle_policies import OracleLfru, OracleLfu, OracleLru, OracleSlru
from tests.helpers.oracle_queues import OracleFifo, OracleS3Fifo, OracleSieve, OracleWTinyLfu
from tests.helpers.oracle_tokens import OracleLeastStale, OracleLrfu

__all__ = ["OracleCache", "OracleLfru", "OracleLfu", "OracleLru", "OracleSlot", "OracleSlru"]

SIMPLE: dict[str, type[OracleLru]] = {
    "arc": OracleArc,
    "fifo": OracleFifo,
    "lecar": OracleLecar,
    "lfru": OracleLfru,
    "lfu": OracleLfu,
    "lrfu": OracleLrfu,
    "lru": OracleLru,
    "s3-fifo": OracleS3Fifo,
    "sieve": OracleSieve,
    "w-tinylfu": OracleWTinyLfu,
}


@dataclass(eq=False)
class OracleSlot:
    """One stay of one expert in the cache; a number is the compiled cache's business."""

    layer: int
    expert: int
    leases: int = 0
    state: str = "filling"
    foreseen: bool = False


class OracleCache:
    """ExpertCache as a dict of stays and one policy, or one policy per layer."""

    def __init__(
        self, num_layers: int, num_experts: int, capacity: int, *, policy: str, scope: str
    ) -> None:
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.capacity = min(capacity, num_layers * num_experts)
        self.slots: dict[tuple[int, int], OracleSlot] = {}
        self.abandoned: list[OracleSlot] = []
        self.num_withheld = 0
        self.counts = [[0] * num_experts for _ in range(num_layers)]
        self.num_hits = self.num_misses = self.num_evictions = 0
        self.num_foreseen_hits = self.num_foreseen_late = self.num_foreseen_unused = 0
        self.is_global = scope == "global"
        share, rest = divmod(self.capacity, num_layers)
        shares = [share + (layer < rest) for layer in range(num_layers)]
        sizes = [self.capacity] if self.is_global else shares
        # The compiled values, whose bits are compared; tests/test_echo_oracle.py is about them.
        self.values: EchoValues | None = None
        if policy in ("echo", "haz2"):
            self.values = EchoValues(Echo(num_layers, num_experts, ring=policy == "echo"))
        self.parts = [self._make_policy(policy, i, size) for i, size in enumerate(sizes)]

    def acquire(
        self,
        layer: int,
        ids: Sequence[int],
        *,
        rows: int = 1,
        share: int = -1,
        drop: bool = False,
        sequences: Sequence[int] | None = None,
    ) -> tuple[list[OracleSlot | None], list[int]]:
        """Return the stay of each id, and what misses_out is to hold."""
        bad = [e for e in ids if not 0 <= e < self.num_experts]
        if bad and not drop:
            raise ValueError(f"expert {bad[0]} is not in [0, {self.num_experts})")
        part = self._part(layer)
        by_row = np.reshape(np.array(ids, np.int64), (rows, -1)).tolist()
        # A row is one token, whatever it repeats.
        uses = Counter(e for row in by_row for e in dict.fromkeys(row) if 0 <= e < self.num_experts)
        hits = [e for e in uses if self._state(layer, e) == "resident"]
        # Stable: ties stay in the order they came.
        missing = sorted((e for e in uses if e not in hits), key=lambda e: -uses[e])
        joined = [e for e in missing if self._state(layer, e) == "filling"]
        wanted = [e for e in missing if e not in joined]
        leased = {self._local(layer, e) for e in hits}
        free_later = [k for k in part.unblocked(part.keys()) if k not in leased]
        room = self._room_left(layer) + len(free_later)
        if share < 0 and len(wanted) > room:
            raise CapacityError(f"{len(wanted)} wanted, room for {room}")
        left = max(0, share - len(hits) - len(joined))
        admitted = len(wanted) if share < 0 else min(len(wanted), left, room)

        if uses and self.values is None:
            part.begin_step(layer, np.reshape(ids, (rows, -1)))
        if uses and self.values is not None:
            self.values.observe(layer, np.reshape(ids, (rows, -1)), sequences)
        most = max(self.num_experts - 1, self.fair_share(layer) if rows > 1 else 0)
        chooses = self.values is not None and len(set(sequences or ())) > 1 and 0 <= share <= most
        if chooses:
            # It is worth, rather than how many rows ask for it; beyond free slots that alone.
            reuse = self.values.echo.reuse[layer]
            came = [e for e in uses if e in missing]
            missing = sorted(came, key=lambda e: -float(reuse[e]))
            joined = [e for e in missing if e in joined]
            wanted = [e for e in missing if e not in joined]
            if self._room_left(layer) == 0:
                admitted = len(wanted)
        for expert in hits + joined:
            self._count(layer, expert, hit=expert in hits)
            part.access(self._local(layer, expert))
            part.held.add(self._local(layer, expert))
            slot = self.slots[layer, expert]
            self.num_foreseen_hits += slot.foreseen and expert in hits
            self.num_foreseen_late += slot.foreseen and expert in joined
            slot.foreseen = False
            slot.leases += 1
        for expert in wanted:
            self._count(layer, expert, hit=False)
            if expert in wanted[:admitted] and chooses and self._room_left(layer) == 0:
                victim = part.victim()
                if victim < 0 or not part.prefers(self._local(layer, expert), victim):
                    admitted = wanted.index(expert)
            if expert in wanted[:admitted]:
                self._take(layer, expert, accessed=True).leases = 1
        first = [ids.index(e) for e in wanted[:admitted]]
        first += [~ids.index(e) for e in joined]
        first += [ids.index(e) for e in wanted[admitted:]]
        return [self.slots.get((layer, e)) for e in ids], first

    def claim(
        self,
        layer: int,
        expert: int,
        *,
        evict: bool = True,
        foreseen: bool = True,
        likely: bool = False,
    ) -> OracleSlot | None:
        """Start a prefetch, if there is room, another expert is worth less, or it is likely."""
        part = self._part(layer)
        if (layer, expert) in self.slots:
            return None
        if self._room_left(layer) == 0:
            if not evict:
                return None
            part.expect(self._local(layer, expert))
            victim = part.victim()
            likely = likely and self.is_global and victim // self.num_experts != layer
            if victim < 0 or not (likely or part.prefers(self._local(layer, expert), victim)):
                return None
        slot = self._take(layer, expert, accessed=False)
        slot.foreseen = foreseen
        return slot

    def publish(self, slot: OracleSlot) -> None:
        """Make a filled expert resident."""
        slot.state = "resident"
        self._update_hold(slot)

    def abandon(self, slot: OracleSlot) -> None:
        """Forget an expert that could not be filled; its slot waits for its leases."""
        self._part(slot.layer).remove(self._local(slot.layer, slot.expert))
        del self.slots[slot.layer, slot.expert]
        slot.state = "abandoned"
        if slot.leases:
            self.abandoned.append(slot)

    def release(self, slots: Sequence[OracleSlot | None]) -> None:
        """End one lease on each distinct slot."""
        for slot in {slot for slot in slots if slot is not None}:
            slot.leases -= 1
            if slot.state == "abandoned":
                if slot.leases == 0:
                    self.abandoned.remove(slot)
            else:
                self._update_hold(slot)

    def withhold(self, gone: Sequence[tuple[int, int]], num: int) -> None:
        """Take slots out of use, those of some experts among them."""
        for layer, expert in gone:
            slot = self.slots.pop((layer, expert))
            self._part(layer).remove(self._local(layer, expert))
            slot.state = "evicted"
            self.num_foreseen_unused += slot.foreseen
            self.num_evictions += 1
        self.num_withheld += num

    def can_give(self, slot: OracleSlot) -> bool:
        """Return whether an expert's slot can be withheld."""
        key = self._local(slot.layer, slot.expert)
        return slot.state == "resident" and bool(self._part(slot.layer).unblocked([key]))

    def pin(self, layer: int, expert: int) -> bool:
        """Keep a resident expert."""
        if self._state(layer, expert) != "resident":
            return False
        return self._part(layer).pin(self._local(layer, expert))

    def unpin(self, layer: int, expert: int) -> None:
        """Let an expert be evicted again."""
        self._part(layer).unpin(self._local(layer, expert))

    def reset_counts(self) -> None:
        """Do what the profiler's reset does."""
        for row in self.counts:
            row[:] = [0] * self.num_experts
        self.num_hits = self.num_misses = 0
        for part in self.parts:
            part.recount()

    def begin_sequence(self) -> None:
        """Tell the policies."""
        for part in self.parts:
            part.begin_sequence()

    def fair_share(self, layer: int) -> int:
        """Return the slots a layer has, or would have if all had the same."""
        share = max(1, (self.capacity - self.num_withheld) // self.num_layers)
        return share if self.is_global else self.parts[layer].capacity

    def resident(self) -> set[tuple[int, int]]:
        """Return the experts that can be used at once."""
        return {place for place, slot in self.slots.items() if slot.state == "resident"}

    @property
    def num_free(self) -> int:
        """Slots that hold nothing and wait for nothing."""
        return self.capacity - len(self.slots) - len(self.abandoned) - self.num_withheld

    def _make_policy(self, policy: str, index: int, size: int) -> OracleLru:
        if policy in SIMPLE:
            return SIMPLE[policy](size)
        if self.values is not None:
            return OracleEchoCache(size, self.values, layer=None if self.is_global else index)
        if policy == "least-stale":
            return OracleLeastStale(size, num_experts=self.num_experts)
        if size == 1:
            return OracleLru(size)
        if policy not in ("slru", "slru-lfu"):
            raise KeyError(f"{policy} has no oracle: it needs a row in SIMPLE")
        probationary = max(1, size // 4)
        count_of = None
        if policy == "slru-lfu":
            count_of = lambda key: self._count_of(index, key)  # noqa: E731 a method's shorthand
        return OracleSlru(probationary, size - probationary, count_of=count_of)

    def _count_of(self, index: int, key: int) -> int:
        layer, expert = divmod(key, self.num_experts) if self.is_global else (index, key)
        return self.counts[layer][expert]

    def _part(self, layer: int) -> OracleLru:
        return self.parts[0 if self.is_global else layer]

    def _local(self, layer: int, expert: int) -> int:
        return layer * self.num_experts + expert if self.is_global else expert

    def _state(self, layer: int, expert: int) -> str:
        slot = self.slots.get((layer, expert))
        return "absent" if slot is None else slot.state

    def _room_left(self, layer: int) -> int:
        waiting = sum(self._part(slot.layer) is self._part(layer) for slot in self.abandoned)
        return self._part(layer).capacity - len(self._part(layer)) - waiting - self.num_withheld

    def _count(self, layer: int, expert: int, *, hit: bool) -> None:
        self.counts[layer][expert] += 1
        self.num_hits += hit
        self.num_misses += not hit

    def _take(self, layer: int, expert: int, *, accessed: bool) -> OracleSlot:
        part = self._part(layer)
        if self._room_left(layer) == 0:
            part.expect(self._local(layer, expert))
            victim = part.victim()
            part.evict(victim)
            place = divmod(victim, self.num_experts) if self.is_global else (layer, victim)
            gone = self.slots.pop(place)
            assert gone.state == "resident"
            self.num_foreseen_unused += gone.foreseen
            self.num_evictions += 1
        part.insert(self._local(layer, expert), accessed=accessed)
        part.held.add(self._local(layer, expert))
        self.slots[layer, expert] = OracleSlot(layer, expert)
        return self.slots[layer, expert]

    def _update_hold(self, slot: OracleSlot) -> None:
        if slot.state == "resident" and slot.leases == 0:
            self._part(slot.layer).held.discard(self._local(slot.layer, slot.expert))
