"""Foresight in plain Python: what was foreseen, what came, and what guesses are worth."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

MAX_GUESSES = 128
NUM_CLASSES = 32
PRIOR_TRIALS = 8
MAX_TRIALS = 1024


class OracleForesight:
    """Foresight over dicts and lists.

    Parameters
    ----------
    num_experts : int
    is_absent : callable (layer, expert) -> bool
        Whether an expert is neither resident nor on its way.
    """

    def __init__(self, num_experts: int, is_absent: Callable[[int, int], bool]) -> None:
        self.num_experts = num_experts
        self.is_absent = is_absent
        self.guesses: dict[int, list[tuple[int, int, bool]]] = {}
        self.trials: defaultdict[int, float] = defaultdict(float)
        self.successes: defaultdict[int, float] = defaultdict(float)
        self.num_used = 0
        self.num_predicted_k = self.num_found_k = 0
        self.num_predicted_2k = self.num_found_2k = 0

    @property
    def counters(self) -> tuple[int, ...]:
        """Everything that is counted."""
        return (
            self.num_used,
            *(self.num_predicted_k, self.num_found_k),
            *(self.num_predicted_2k, self.num_found_2k),
        )

    def likelihood(self, number: int, *, scored: bool) -> float:
        """Return how often guesses of a class were right, a prior included."""
        prior = number / (NUM_CLASSES - 1) if scored else 0.5
        right = self.successes[number] + PRIOR_TRIALS * prior
        return right / (self.trials[number] + PRIOR_TRIALS)

    def expect(
        self, layer: int, ids: Sequence[int], scores: Sequence[float] | None, min_likelihood: float
    ) -> tuple[list[int], int]:
        """Note a prediction; return the experts that are missing and likely enough.

        Those that are more likely than not come first; the number of them stands beside.
        """
        guesses: list[tuple[int, int, bool]] = []
        likely, others = [], []
        for index, expert in enumerate(ids):
            known = {guess[0] for guess in guesses}
            if not 0 <= expert < self.num_experts or expert in known or len(guesses) == MAX_GUESSES:
                continue
            number = min(len(guesses), NUM_CLASSES - 1)
            if scores is not None:
                share = min(np.float32(scores[index]), np.float32(1))
                number = int(share * np.float32(NUM_CLASSES - 1))
            absent = self.is_absent(layer, expert)
            guesses.append((expert, number, absent))
            chance = self.likelihood(number, scored=scores is not None)
            if absent and chance >= min_likelihood:
                (likely if chance > 0.5 else others).append(expert)
        self.guesses[layer] = guesses
        return likely + others, len(likely)

    def score(self, layer: int, ids: Sequence[int]) -> None:
        """Compare a prediction with what came."""
        guesses = self.guesses.pop(layer, [])
        if not guesses:
            return
        used = {expert for expert in ids if 0 <= expert < self.num_experts}
        self.num_used += len(used)
        for length, name in ((len(used), "k"), (2 * len(used), "2k")):
            first = [expert for expert, _, _ in guesses[:length]]
            setattr(
                self, f"num_predicted_{name}", getattr(self, f"num_predicted_{name}") + len(first)
            )
            found = getattr(self, f"num_found_{name}") + len(used.intersection(first))
            setattr(self, f"num_found_{name}", found)
        for expert, number, absent in guesses:
            if not absent:
                continue
            if self.trials[number] >= MAX_TRIALS:
                self.trials[number] /= 2
                self.successes[number] /= 2
            self.trials[number] += 1
            self.successes[number] += expert in used

    def drop(self, layer: int) -> None:
        """Forget a prediction."""
        self.guesses.pop(layer, None)
