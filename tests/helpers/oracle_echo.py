"""Plain-Python ECHO, written from its specification to be read, not to be fast.

Every number is a float32, as in the compiled policy; only `exp` and powers are computed in double
precision and rounded, which the C library does but for the last bit.
"""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.helpers.oracle_policies import OracleLru

F = np.float32
Floats = npt.NDArray[np.float32]

RING = 256  # tokens whose routing is remembered
NEIGHBOURS = 8
NEIGHBOURS_AHEAD = 16  # when the next layer is predicted
SUCCESSORS = 3
SCORE_DECAY = F(0.8)  # per layer
MATCH = F(0.6)  # per expert that two requests share
CARRY = F(0.5)  # of a score, to the next token
TEMPERATURE = F(0.5)  # of votes
LOWEST = F(-3.0)  # score that a token inherits
SUCCESSOR_DISCOUNT = 0.7
GAMMA = F(0.6)  # discount of a use, per token until it
PRIOR = F(0.2)
PRIOR_AHEAD = F(0.5)
RATE_MID = F(0.04)
RATE_SLOW = F(0.001)
RATE_TABLE = F(0.002)
POPULARITIES, AGES = 12, 16
NEVER = -100_000
ONE = F(1)
NOBODY = F(-np.inf)


def half_octaves(x: Floats) -> npt.NDArray[np.int64]:
    """Return the index of the half octave each number lies in, 0 from 1 on."""
    return (x.view(np.uint32) >> 22).astype(np.int64) - (int(ONE.view(np.uint32)) >> 22)


def exp(x: np.float32) -> np.float32:
    """Return e**x."""
    return F(math.exp(x))


class OracleSequence:
    """How much the remembered tokens resemble a sequence's current one."""

    def __init__(self, seen: int) -> None:
        self.scores = np.full(RING, NOBODY)
        self.token = 0  # its last one
        self.seen = seen  # no later token has a score
        self.used = 0


class OracleEcho:
    """The predictor: what was seen, and the value of every expert; HAZ2 without the ring."""

    def __init__(self, num_layers: int, num_experts: int, *, ring: bool = True) -> None:
        shape = num_layers, num_experts
        self.num_layers, self.num_experts, self.ring = num_layers, num_experts, ring
        self.k = 0
        self.t = 0
        self.layer = 0
        self.lowest = num_layers
        self.em, self.es = np.zeros(shape, F), np.zeros(shape, F)
        self.last = np.full(shape, NEVER)
        self.cell = np.full(shape, 6 * AGES + AGES - 1)
        self.p, self.q, self.reuse = np.zeros(shape, F), np.zeros(shape, F), np.zeros(shape, F)
        self.table = np.zeros(POPULARITIES * AGES, F)
        self.counts = np.zeros(POPULARITIES * AGES, int)
        self.used = np.zeros((num_layers, RING, num_experts), bool)
        # The token of the same sequence before, and after, each token of the ring.
        self.previous: dict[int, int] = {}
        self.following: dict[int, int] = {}
        self.sequences: dict[Any, OracleSequence] = {}
        self.current: list[OracleSequence] = []
        self.num_steps = 0
        self.num_unnamed = 0
        self.between = True

    def observe(
        self, layer: int, rows: npt.ArrayLike, *, sequences: npt.ArrayLike | None = None
    ) -> None:
        """See what consecutive tokens, or those of several sequences, use at a layer."""
        requests = [self.used_by(row) for row in np.atleast_2d(np.asarray(rows, np.int64))]
        if not requests or not np.size(rows):
            return
        names = None if sequences is None else np.asarray(sequences).tolist()
        owners = self.follow(names, len(requests))
        self.lowest = min(self.lowest, layer)
        num_rows = len(requests)
        if self.k == 0:
            # Nothing is known of a model before its first expert.
            requests = list(itertools.dropwhile(lambda used: not used.any(), requests))
            owners = owners[num_rows - len(requests) :]
        if not requests:
            return
        if self.k == 0:
            self.start(int(requests[0].sum()))
        several = len(self.current) > 1
        latest: dict[int, int] = {}
        for age, used, owner in zip(reversed(range(len(requests))), requests, owners, strict=True):
            # Any of a step's tokens begins at its lowest layer; at the others they are there.
            if layer == self.lowest:
                self.begin_token(owner)
            token = self.t if layer == self.lowest else max(1, self.t - age)
            if layer == self.lowest or (age == 0 and not several):
                self.score(owner, layer, used)
            self.used[layer, token % RING] = used
            latest[id(owner)] = token
            if not several:
                self.learn(layer, token, used.astype(F))
                self.average(layer, token, used.astype(F))
        if several:
            self.at_once(layer, owners, latest, requests, num_rows)
        self.layer = layer
        self.value(layer)

    def follow(self, names: list[int] | None, rows: int) -> list[OracleSequence]:
        """Return the sequence of each row; the 65th takes the place of the oldest."""
        before = self.current
        self.num_steps += 1
        if names is None:
            self.num_unnamed += self.between
            self.between = False
            keys: list[Any] = [("unnamed", self.num_unnamed)] * rows
        else:
            keys = list(names)
        is_new = keys[0] not in self.sequences
        for key in keys:
            if key in self.sequences:
                self.sequences[key].used = self.num_steps
        for key in keys:
            if key not in self.sequences:
                if len(self.sequences) == 64:
                    del self.sequences[
                        min(self.sequences, key=lambda known: self.sequences[known].used)
                    ]
                self.sequences[key] = OracleSequence(self.t)
                self.sequences[key].used = self.num_steps
        owners = [self.sequences[key] for key in keys]
        self.current = list(dict.fromkeys(owners))
        if is_new and len(before) == len(self.current) == 1:
            # One after another: the new one is taken to look like the last one.
            self.current[0].scores = before[0].scores.copy()
            self.current[0].token, self.current[0].seen = before[0].token, before[0].seen
            self.em[:] = self.es
        return owners

    def at_once(
        self,
        layer: int,
        owners: list[OracleSequence],
        latest: dict[int, int],
        requests: list[npt.NDArray[np.bool_]],
        rows: int,
    ) -> None:
        """Learn the mean of rows of several sequences, and score the last one of each."""
        share = np.sum(requests, axis=0).astype(F) / F(rows)
        self.learn(layer, max(1, self.t), share, rows)
        self.average(layer, max(1, self.t), share, rows)
        for sequence in self.current:
            if layer != self.lowest:
                self.score(sequence, layer, self.used[layer, latest.get(id(sequence), 0) % RING])
                continue
            for age, owner in zip(reversed(range(len(owners))), owners, strict=True):
                # What follows tokens that are under way at the same time is not known.
                if owner is not sequence and age < RING:
                    sequence.scores[(self.t - age) % RING] = NOBODY

    def used_by(self, row: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which experts a row names."""
        used = np.zeros(self.num_experts, bool)
        used[row[(row >= 0) & (row < self.num_experts)]] = True
        return used

    def start(self, k: int) -> None:
        """Set what depends on the number of experts of a request."""
        self.k = k
        share = F(k) / F(self.num_experts)
        self.em[:] = self.es[:] = share
        for cell in range(POPULARITIES * AGES):
            power = F(2.0 ** ((cell // AGES - 6) / 1.5))
            self.table[cell] = min(F(0.9), share * power)

    def begin_token(self, sequence: OracleSequence) -> None:
        """Let every remembered token inherit half of its predecessor's score."""
        self.t += 1
        highest = sequence.scores.max()
        inherited = np.full(RING, NOBODY)
        for token in range(max(1, self.t - RING + 1), self.t):
            inherited[token % RING] = LOWEST
            previous = self.previous.get(token, -1)
            if self.t - RING <= previous <= sequence.seen:
                before = sequence.scores[previous % RING]
                if before > NOBODY:
                    inherited[token % RING] = max(LOWEST, CARRY * (before - highest))
        sequence.scores = inherited
        self.unlink(self.t - RING)
        if sequence.token and self.t - sequence.token < RING:
            self.unlink(sequence.token)
            self.previous[self.t] = sequence.token
            self.following[sequence.token] = self.t
        sequence.token = sequence.seen = self.t

    def unlink(self, token: int) -> None:
        """Forget what followed a token."""
        if token in self.following:
            del self.previous[self.following.pop(token)]

    def score(self, sequence: OracleSequence, layer: int, used: npt.NDArray[np.bool_]) -> None:
        """Score the remembered tokens by what they share with this request."""
        shared = (self.used[layer] & used).sum(axis=1).astype(F)
        sequence.scores = SCORE_DECAY * sequence.scores + MATCH * shared

    def learn(self, layer: int, token: int, used: Floats, rows: int = 1) -> None:
        """Count a quarter of the experts in their old cells of the table."""
        for expert in range(token // rows % 4, self.num_experts, 4):
            cell = self.cell[layer, expert]
            rate = max(RATE_TABLE, ONE / (F(self.counts[cell]) + F(1.5)))
            self.table[cell] += rate * (used[expert] - self.table[cell])
            self.counts[cell] += 1

    def average(self, layer: int, token: int, used: Floats, rows: int = 1) -> None:
        """Move the averages of all experts of a layer, and find their cells."""
        self.last[layer, used > 0] = token
        first = min(ONE, F(rows) / F(token + 5))
        for mean, rate in (self.es, RATE_SLOW), (self.em, RATE_MID):
            # As many rows of the same use, one after the other.
            total = rate
            for _ in range(rows - 1):
                total += rate * (ONE - total)
            mean[layer] += max(total, first) * (used - mean[layer])
        popularity = half_octaves(self.es[layer] * (F(self.num_experts) / F(self.k))) + 7
        # An older row may come after a newer one, where a layer is visited twice.
        ago = np.maximum(token - self.last[layer], 0).astype(F)
        age = half_octaves(ago * (ONE / F(rows)) + ONE)
        self.cell[layer] = popularity.clip(0, POPULARITIES - 1) * AGES + age.clip(max=AGES - 1)

    def nearest(self, sequence: OracleSequence, n: int) -> list[int]:
        """Return the slots of the highest scores, of equal ones the lower first."""
        order = np.argsort(-sequence.scores, kind="stable")[:n].tolist()
        return [slot for slot in order if sequence.scores[slot] > NOBODY]

    def votes(self, sequence: OracleSequence, layer: int) -> tuple[Floats, np.float32]:
        """Return what followed the nearest tokens at this layer, and the sum of the weights."""
        votes, total = np.zeros(self.num_experts, F), F(0)
        slots = self.nearest(sequence, NEIGHBOURS) if self.ring else []
        for slot in slots:
            weight = exp(TEMPERATURE * (sequence.scores[slot] - sequence.scores[slots[0]]))
            total += weight
            token: int | None = self.t - (self.t - slot) % RING
            for j in range(SUCCESSORS):
                token = self.following.get(token)  # type: ignore[arg-type]
                if token is None:
                    break
                votes[self.used[layer, token % RING]] += weight * F(SUCCESSOR_DISCOUNT**j)
        return votes / F(1 + SUCCESSOR_DISCOUNT + SUCCESSOR_DISCOUNT**2), total

    def value(self, layer: int) -> None:
        """Give every expert of a layer its probability and its discounted reuse."""
        hazard = self.table[self.cell[layer]].clip(F(1e-4), F(0.999))
        mean = np.minimum(self.em[layer] + F(5e-4), F(0.999))
        use = np.sqrt(mean * hazard)
        p = use / (use + np.sqrt((ONE - mean) * (ONE - hazard)))
        uses = []
        for sequence in self.current:
            votes, total = self.votes(sequence, layer)
            uses.append((votes + PRIOR * p) / (total + PRIOR) if self.ring else p)
        q, again = self.any_of(uses), self.any_of([p] * len(uses))
        self.p[layer], self.q[layer] = p, q
        self.reuse[layer] = q + (ONE - q) * (GAMMA * again) / (ONE - GAMMA + GAMMA * again)

    @staticmethod
    def any_of(uses: list[Floats]) -> Floats:
        """Return how likely any of several sequences uses each expert."""
        if len(uses) == 1:
            return uses[0]
        spared = np.ones_like(uses[0])
        for use in uses:
            spared *= np.maximum(ONE - use, 0)
        return ONE - spared

    def chances(self, layer: int) -> Floats:
        """Return how likely each expert of a layer is used next.

        Later in this token by the tokens that look like it so far, else by the layer's last visit.
        """
        if not self.ring or layer <= self.layer:
            return self.q[layer]
        uses = []
        for sequence in self.current:
            votes, total = np.zeros(self.num_experts, F), F(0)
            slots = self.nearest(sequence, NEIGHBOURS_AHEAD)
            for slot in slots:
                weight = exp(sequence.scores[slot] - sequence.scores[slots[0]])
                total += weight
                votes[self.used[layer, slot]] += weight
            uses.append((votes + PRIOR_AHEAD * self.p[layer]) / (total + PRIOR_AHEAD))
        return self.any_of(uses)

    def begin_sequence(self) -> None:
        """Let the next rows without a name be a sequence of their own."""
        self.between = True


class EchoValues:
    """What keys are worth to ECHO: their reuse, less the wait until their layer comes round."""

    def __init__(self, echo: Any) -> None:
        self.echo = echo
        self.layer = 0
        self.started = False

    def observe(
        self, layer: int, rows: npt.ArrayLike, sequences: npt.ArrayLike | None = None
    ) -> None:
        """Let a request be seen; the waits are counted from its layer."""
        self.echo.observe(layer, rows, sequences=sequences)
        ids = np.asarray(rows)
        self.started |= bool(((ids >= 0) & (ids < self.echo.num_experts)).any())
        if self.started and ids.size:
            self.layer = layer

    def worth(self, key: int, reuse: Floats | None = None) -> np.float32:
        """Return what a key is worth."""
        reuse = self.echo.reuse if reuse is None else reuse
        layer, expert = divmod(key, self.echo.num_experts)
        wait = F((layer - self.layer) % self.echo.num_layers or self.echo.num_layers)
        return F(reuse[layer, expert] * F(float(GAMMA) ** float(wait / F(self.echo.num_layers))))

    def victim(self, keys: Iterable[int]) -> int:
        """Return the key of the least worth, or -1: of equal ones the lower layer's, then key."""
        reuse = self.echo.reuse

        def rank(key: int) -> tuple[float, ...]:
            layer, expert = divmod(key, self.echo.num_experts)
            # Two values of one layer may be worth the same only because that is rounded.
            return float(self.worth(key, reuse)), layer, float(reuse[layer, expert]), key

        return min(keys, key=rank, default=-1)

    def begin_sequence(self) -> None:
        """Pass the boundary on."""
        self.echo.begin_sequence()

    def reset(self) -> None:
        """Forget everything."""
        self.echo.reset()
        self.layer = 0
        self.started = False


class OracleEchoCache(OracleLru):
    """ECHO as a search through all keys; those of one layer are its experts."""

    def __init__(self, capacity: int, values: EchoValues, *, layer: int | None = None) -> None:
        super().__init__(capacity)
        self.values = values
        self.layer = layer
        self.first = (layer or 0) * values.echo.num_experts

    def begin_step(self, layer: int, rows: npt.ArrayLike = ()) -> None:
        """See a request."""
        self.values.observe(layer, rows)

    def begin_sequence(self) -> None:
        """See a boundary; one of those that share an Echo is enough."""
        if not self.first:
            self.values.begin_sequence()

    def clear(self) -> None:
        """Forget everything, and what the others that share the Echo have learned."""
        super().clear()
        self.values.reset()

    def victim(self) -> int:
        """Return the key that is worth least."""
        found = self.values.victim(self.first + key for key in self.evictable())
        return found if found < 0 else found - self.first

    def prefers(self, candidate: int, resident: int) -> bool:
        """Return whether the candidate is worth more."""
        worth = self.values.worth
        return bool(worth(self.first + candidate) > worth(self.first + resident))
