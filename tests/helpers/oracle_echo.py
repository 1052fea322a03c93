"""Plain-Python ECHO, written from its specification to be read, not to be fast.

Every number is a float32, as in the compiled policy; only `exp` and powers are computed in double
precision and rounded, which the C library does but for the last bit.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

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
DISCOUNT = 0.6  # of a use, per token until it
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


class OracleEcho:
    """The predictor: what was seen, and the value of every expert; HAZ2 without the ring."""

    def __init__(self, num_layers: int, num_experts: int, *, ring: bool = True) -> None:
        shape = num_layers, num_experts
        self.num_layers, self.num_experts, self.ring = num_layers, num_experts, ring
        self.k = 0
        self.t = 0
        self.layer = -1
        self.em, self.es = np.zeros(shape, F), np.zeros(shape, F)
        self.last = np.full(shape, NEVER)
        self.cell = np.full(shape, 6 * AGES + AGES - 1)
        self.p, self.q, self.reuse = np.zeros(shape, F), np.zeros(shape, F), np.zeros(shape, F)
        self.table = np.zeros(POPULARITIES * AGES, F)
        self.counts = np.zeros(POPULARITIES * AGES, int)
        self.scores = np.full(RING, NOBODY)
        self.used = np.zeros((num_layers, RING, num_experts), bool)
        self.seen = np.zeros(num_layers, bool)

    def observe(self, layer: int, rows: Iterable[Sequence[int]]) -> None:
        """See what consecutive tokens use at a layer, and value its experts anew."""
        requests = [self.used_by(row) for row in rows]
        if self.k == 0:
            self.start(int(requests[0].sum()))
        self.layer = layer
        for i, used in enumerate(requests):
            is_last = i == len(requests) - 1
            if layer == 0:
                self.begin_token()
            token = self.t if layer == 0 else self.t - (len(requests) - 1 - i)
            if layer == 0 or is_last:
                self.score(layer, used)
            self.used[layer, token % RING] = used
            self.learn(layer, token, used)
            self.average(layer, token, used)
        self.value(layer)
        self.seen[layer] = True

    def used_by(self, row: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return which experts a row names."""
        used = np.zeros(self.num_experts, bool)
        used[[expert for expert in row if 0 <= expert < self.num_experts]] = True
        return used

    def start(self, k: int) -> None:
        """Set what depends on the number of experts of a request."""
        self.k = k
        share = F(k) / F(self.num_experts)
        self.em[:] = self.es[:] = share
        for cell in range(POPULARITIES * AGES):
            power = F(2.0 ** ((cell // AGES - 6) / 1.5))
            self.table[cell] = min(F(0.9), share * power)

    def begin_token(self) -> None:
        """Let every remembered token inherit half of its predecessor's score."""
        self.t += 1
        highest = self.scores.max()
        inherited = np.full(RING, NOBODY)
        for token in range(max(1, self.t - RING + 1), self.t):
            before = self.scores[(token - 1) % RING]
            inherited[token % RING] = LOWEST
            if before > NOBODY:
                inherited[token % RING] = max(LOWEST, CARRY * (before - highest))
        self.scores = inherited

    def score(self, layer: int, used: npt.NDArray[np.bool_]) -> None:
        """Score the remembered tokens by what they share with this request."""
        shared = (self.used[layer] & used).sum(axis=1).astype(F)
        self.scores = SCORE_DECAY * self.scores + MATCH * shared

    def learn(self, layer: int, token: int, used: npt.NDArray[np.bool_]) -> None:
        """Count a quarter of the experts in their old cells of the table."""
        for expert in range(token % 4, self.num_experts, 4):
            cell = self.cell[layer, expert]
            rate = max(RATE_TABLE, ONE / (F(self.counts[cell]) + F(1.5)))
            self.table[cell] += rate * (F(used[expert]) - self.table[cell])
            self.counts[cell] += 1

    def average(self, layer: int, token: int, used: npt.NDArray[np.bool_]) -> None:
        """Move the averages of all experts of a layer, and find their cells."""
        self.last[layer, used] = token
        first = ONE / F(token + 5)
        for mean, rate in (self.es, RATE_SLOW), (self.em, RATE_MID):
            mean[layer] += max(rate, first) * (used.astype(F) - mean[layer])
        popularity = half_octaves(self.es[layer] * (F(self.num_experts) / F(self.k))) + 7
        age = half_octaves((token - self.last[layer] + 1).astype(F))
        self.cell[layer] = popularity.clip(0, POPULARITIES - 1) * AGES + age.clip(max=AGES - 1)

    def nearest(self, n: int) -> list[int]:
        """Return the slots of the highest scores, of equal ones the lower first."""
        order = np.argsort(-self.scores, kind="stable")[:n].tolist()
        return [slot for slot in order if self.scores[slot] > NOBODY]

    def votes(self, layer: int) -> tuple[Floats, np.float32]:
        """Return what followed the nearest tokens at this layer, and the sum of the weights."""
        votes, total = np.zeros(self.num_experts, F), F(0)
        slots = self.nearest(NEIGHBOURS) if self.ring else []
        for slot in slots:
            weight = exp(TEMPERATURE * (self.scores[slot] - self.scores[slots[0]]))
            total += weight
            age = (self.t - slot) % RING
            for j in range(1, min(SUCCESSORS, age) + 1):
                used = self.used[layer, (slot + j) % RING]
                votes[used] += weight * F(SUCCESSOR_DISCOUNT ** (j - 1))
        return votes / F(1 + SUCCESSOR_DISCOUNT + SUCCESSOR_DISCOUNT**2), total

    def value(self, layer: int) -> None:
        """Give every expert of a layer its probability and its discounted reuse."""
        hazard = self.table[self.cell[layer]].clip(F(1e-4), F(0.999))
        mean = np.minimum(self.em[layer] + F(5e-4), F(0.999))
        use = np.sqrt(mean * hazard)
        p = use / (use + np.sqrt((ONE - mean) * (ONE - hazard)))
        votes, total = self.votes(layer)
        q = (votes + PRIOR * p) / (total + PRIOR) if self.ring else p
        gamma = F(DISCOUNT)
        self.p[layer], self.q[layer] = p, q
        self.reuse[layer] = q + (ONE - q) * (gamma * p) / (ONE - gamma + gamma * p)

    def chances(self, layer: int) -> Floats:
        """Return how likely each expert of a layer is used next.

        Later in this token by the tokens that look like it so far, else by the layer's last visit.
        """
        if not self.ring or layer <= self.layer:
            return self.q[layer]
        votes, total = np.zeros(self.num_experts, F), F(0)
        slots = self.nearest(NEIGHBOURS_AHEAD)
        for slot in slots:
            weight = exp(self.scores[slot] - self.scores[slots[0]])
            total += weight
            votes[self.used[layer, slot]] += weight
        return (votes + PRIOR_AHEAD * self.p[layer]) / (total + PRIOR_AHEAD)

    def begin_sequence(self) -> None:
        """Forget the mid-term averages."""
        self.em[:] = self.es

    def keys(self, residents: Iterable[int]) -> dict[int, np.float32]:
        """Return what each resident is worth now: its reuse, less the wait until its layer."""
        worth = {}
        for key in residents:
            layer, expert = divmod(key, self.num_experts)
            wait = (layer - self.layer) / self.num_layers
            factor = F(DISCOUNT ** (wait if wait > 0 else wait + 1))
            worth[key] = self.reuse[layer, expert] * factor
        return worth

    def victim(self, residents: Iterable[int]) -> int:
        """Return the resident of the least worth, of equal ones the lower key, or -1."""
        worth = self.keys(residents)
        return min(sorted(worth), key=lambda key: worth[key], default=-1)
