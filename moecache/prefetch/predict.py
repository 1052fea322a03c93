"""Predictors: which experts a layer will use next."""

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from moecache.errors import ConfigError
from moecache.policies._echo import Echo

Prediction = tuple[np.ndarray, np.ndarray | None]


@runtime_checkable
class Predictor(Protocol):
    """Learns from what routers chose, and says what they will. `Echo` is one."""

    def observe(self, layer: int, ids: np.ndarray) -> None:
        """Learn what a step used at a layer: int32 or int64 [..., top_k]."""

    def predict(self, layer: int, n: int) -> Prediction:
        """Return up to n experts, int32 [m], the likeliest first, and their scores.

        Scores are float32 [m], probabilities of use, or None: then places count.
        """

    def begin_sequence(self) -> None:
        """Learn that the next token does not continue the last one."""


class LastSelection:
    """Predicts that a layer uses what it used the last time, in the router's order.

    Parameters
    ----------
    num_layers : int
        Layers out of range are ignored: they learn nothing and predict nothing.
    max_active : int, optional
        Most experts that are predicted; by default as many as were chosen.
    history : int, default 1
        With 2 the last selection is followed by what the one before had besides.

    Raises
    ------
    ConfigError
        If a number is out of range.
    """

    def __init__(self, num_layers: int, max_active: int | None = None, *, history: int = 1) -> None:
        if num_layers < 1 or history not in {1, 2}:
            raise ConfigError(
                f"num_layers must be at least 1 and history 1 or 2, got {num_layers} and {history}"
            )
        if max_active is not None and max_active < 0:
            raise ConfigError(f"max_active must not be negative, got {max_active}")
        self._selections: list[np.ndarray | None] = [None] * num_layers
        self._max_active = max_active
        self._history = history

    def observe(self, layer: int, ids: npt.ArrayLike) -> None:
        """Remember the last row of what was chosen."""
        if not 0 <= layer < len(self._selections):
            return
        rows = np.asarray(ids)
        if not rows.size:
            return
        # A copy: the caller's array may change before it is asked for.
        row = (rows.reshape(-1, rows.shape[-1])[-1] if rows.ndim > 1 else rows).astype(np.int32)
        row = row[row >= 0].reshape(-1)
        before = self._selections[layer]
        if self._history == 2 and before is not None:
            rest = before[~np.isin(before, row)]
            row = np.concatenate((row, rest))[: 2 * len(row)]
        self._selections[layer] = row

    def predict(self, layer: int, n: int) -> Prediction:
        """Return the first min(n, max_active) of them; nothing of a layer that was not seen."""
        if not 0 <= layer < len(self._selections):
            return np.empty(0, np.int32), None
        selection = self._selections[layer]
        if selection is None:
            return np.empty(0, np.int32), None
        most = n if self._max_active is None else min(n, self._max_active)
        return selection[:most].copy(), None

    def begin_sequence(self) -> None:
        """Forget the selections."""
        self._selections = [None] * len(self._selections)


class Frequency:
    """Predicts what a layer has used most.

    Parameters
    ----------
    num_layers, num_experts : int
        Shape of the model, each at least 1. Layers out of range are ignored.

    Raises
    ------
    ConfigError
        If a number is below 1.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        if num_layers < 1 or num_experts < 1:
            raise ConfigError(
                f"num_layers and num_experts must be at least 1, got {num_layers} and {num_experts}"
            )
        self._counts = np.zeros((num_layers, num_experts), np.int64)
        self._num_rows = np.zeros(num_layers, np.int64)

    def observe(self, layer: int, ids: npt.ArrayLike) -> None:
        """Count what was chosen; ids out of range are dropped."""
        if not 0 <= layer < len(self._counts):
            return
        rows = np.asarray(ids)
        valid = rows[(rows >= 0) & (rows < self._counts.shape[1])]
        np.add.at(self._counts[layer], valid, 1)
        self._num_rows[layer] += rows.size // max(1, rows.shape[-1] if rows.ndim else 1)

    def predict(self, layer: int, n: int) -> Prediction:
        """Return the most used, ties by id, and in what share of the tokens they were used."""
        if not 0 <= layer < len(self._counts):
            return np.empty(0, np.int32), np.empty(0, np.float32)
        counts = self._counts[layer]
        order = np.argsort(-counts, kind="stable")[:n]
        order = order[counts[order] > 0].astype(np.int32)
        share = counts[order] / max(1, int(self._num_rows[layer]))
        return order, np.minimum(share, 1).astype(np.float32)

    def begin_sequence(self) -> None:
        """Do nothing: counts are of all sequences."""


class SharedEcho:
    """Predicts as ECHO does, from what the cache's own policy has learned.

    Parameters
    ----------
    echo : Echo
        `ExpertCache.echo`: it observes each request before anything is predicted.
    """

    def __init__(self, echo: Echo) -> None:
        self.predict = echo.predict

    def observe(self, layer: int, ids: npt.ArrayLike) -> None:
        """Do nothing: the policy did."""

    def begin_sequence(self) -> None:
        """Do nothing: the policy is told."""
