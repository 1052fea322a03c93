"""Exchange: the rows of one step, each computed by one rank, brought to all."""

import time
import traceback
import zlib
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from moecache.errors import MoeCacheError
from moecache.integrations.transformers._ranks import Ranks

# A message begins with the step's outcome and a checksum of its ids.
_HEADER = 16
_OK, _FAILED = 0, 1
# From this many bytes of rows on, rows of resident experts are sent while misses are read. That
# takes one more collective; at a gigabit per second its latency equals that of these bytes.
EARLY_BYTES = 64 * 1024


class Exchange:
    """The rows of one step: those of this rank's experts, and then everybody's. A context manager.

    All ranks have the same ids, and so know which rows come from where. Nothing is added up on its
    way: a row has the bits that its rank computed. If there is much to send, the rows of the
    first wave go as soon as they are computed, while misses are read; a collective of one byte per
    row says before which these are.

    Leaving it brings the rows of all others; after an error it tells the others of that.

    Parameters
    ----------
    ranks : Ranks
    layer : int
    ids : ndarray of int, shape [num_tokens, top_k]
    width : int
        Numbers in a row.
    dtype : torch.dtype
    device : torch.device

    Attributes
    ----------
    rows : Tensor, shape [num_tokens * top_k, width]
        Those of this rank's pairs are written by the caller.
    """

    def __init__(
        self,
        ranks: Ranks,
        layer: int,
        ids: np.ndarray,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        ranks.check()
        assert ranks.share is not None
        ranks.note()
        self.rows = torch.empty((ids.size, width), dtype=dtype, device=device)
        self._ranks = ranks
        self._layer = layer
        self._digest = zlib.crc32(ids.tobytes())
        computed_by = ranks.share.ranks_of(layer, ids)
        self._pairs = [np.flatnonzero(computed_by == rank) for rank in range(ranks.num_ranks)]
        self._others = [rank for rank in range(ranks.num_ranks) if rank != ranks.rank]
        self._to = torch.device("cpu") if ranks.is_on_host else device
        self._sends: list[Any] = []
        self._masks: list[torch.Tensor] = []
        self._gathering: Any = None
        # The awaited messages: sender, pairs, bytes to receive into, and the work.
        self._awaited: list[tuple[int, np.ndarray, torch.Tensor, Any]] = []
        self._done = np.zeros(len(self._pairs[ranks.rank]), bool)
        self._early: list[np.ndarray] | None = None  # of each rank, which rows went first
        self.is_early = self.rows.nbytes >= EARLY_BYTES
        if not self.is_early:
            self._receive(self._pairs)

    def add(self, pairs: np.ndarray, rows: torch.Tensor | None = None) -> None:
        """Note that a wave's pairs are computed; `rows` are written if they were not yet."""
        if rows is not None:
            self.rows[torch.from_numpy(pairs if pairs.flags.writeable else pairs.copy())] = rows
        if not self.is_early:
            return
        self._done[np.searchsorted(self._pairs[self._ranks.rank], pairs)] = True
        if self._gathering is None:
            self._say_which()
        elif self._early is None and self._gathering.is_completed():
            self._send_early(_OK)

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Bring the rows of all ranks, or tell them of an error."""
        if error is None:
            self._finish(_OK)
            return
        if not isinstance(error, Exception):
            self._end(error)
            return
        try:
            self._ranks.tell(error)
            self._finish(_FAILED)
        except MoeCacheError:
            pass  # the first error is the one that counts

    def _finish(self, status: int) -> None:
        began = time.perf_counter_ns()
        try:
            self._bring(status)
        except Exception:
            raise
        except BaseException as error:
            self._end(error)
            raise
        finally:
            self._ranks.waited_ns += time.perf_counter_ns() - began

    def _bring(self, status: int) -> None:
        mine = self._pairs[self._ranks.rank]
        try:
            if not self.is_early:
                self._send(mine, status)
            else:
                if self._gathering is None:
                    if status == _OK:
                        self._done[:] = True
                    self._say_which()
                if self._early is None:
                    self._send_early(status)
                assert self._early is not None
                left = [~early for early in self._early]
                self._receive([pairs[rest] for pairs, rest in zip(self._pairs, left, strict=True)])
                self._send(mine[left[self._ranks.rank]], status)
            failed = [rank for rank, *message in self._awaited if self._take(rank, *message)]
            for work in self._sends:
                work.wait()
        except RuntimeError as error:
            # MoeCacheError is no RuntimeError.
            raise self._ranks.lost(f"at layer {self._layer}", error) from error
        if failed and status == _OK:
            raise self._ranks.failed(sorted(set(failed)), self._layer)

    def _end(self, error: BaseException) -> None:
        """End this rank, as it was interrupted: nobody is waited for, and everybody is told."""
        # Connections stay open for as long as anybody has what waits for them.
        self._sends, self._awaited, self._gathering = [], [], None
        traceback.clear_frames(error.__traceback__)
        self._ranks.close("it was interrupted")

    def _say_which(self) -> None:
        """Begin to tell everybody which rows are computed by now."""
        self._first = self._done.copy()
        most = max(len(pairs) for pairs in self._pairs)
        mine = torch.zeros(most, dtype=torch.uint8)
        mine[: len(self._first)] = torch.from_numpy(self._first.view(np.uint8))
        mine = mine.to(self._to)
        self._masks = [torch.empty_like(mine) for _ in self._pairs]
        self._gathering = self._ranks.begin_gather(self._masks, mine)
        self._ranks.sent_bytes += most * len(self._others)

    def _send_early(self, status: int) -> None:
        """Send what was computed first, now that everybody knows what that is."""
        self._ranks.wait(self._gathering)
        masks = [mask.cpu().numpy().astype(bool) for mask in self._masks]
        early = [mask[: len(pairs)] for mask, pairs in zip(masks, self._pairs, strict=True)]
        self._early = early
        parts = [pairs[which] for pairs, which in zip(self._pairs, early, strict=True)]
        self._receive(parts)
        self._send(parts[self._ranks.rank], status)
        self._ranks.num_early += bool(0 < early[self._ranks.rank].sum() < len(self._done))

    def _receive(self, pairs: list[np.ndarray]) -> None:
        """Expect rows from every other rank."""
        for rank in self._others:
            message = self._message(len(pairs[rank]))
            work = self._ranks.receive(message, rank)
            self._awaited.append((rank, pairs[rank], message, work))

    def _send(self, pairs: np.ndarray, status: int) -> None:
        """Send this rank's rows of some pairs to every other rank."""
        message = self._message(len(pairs))
        header = np.array([status, self._digest], np.uint64)
        message[:_HEADER] = torch.from_numpy(header.view(np.uint8)).to(self._to)
        if len(pairs):
            message[_HEADER:] = (
                self.rows[torch.from_numpy(pairs)].to(self._to).view(torch.uint8).view(-1)
            )
        self._sends += [self._ranks.send(message, rank) for rank in self._others]
        self._ranks.sent_bytes += message.nbytes * len(self._others)

    def _take(self, rank: int, pairs: np.ndarray, message: torch.Tensor, work: Any) -> bool:
        """Wait for a message, and put its rows in their places; return whether its rank failed."""
        work.wait()
        status, digest = message[:_HEADER].cpu().numpy().view(np.uint64).tolist()
        if digest != self._digest:
            raise self._ranks.parted(rank, self._layer)
        if len(pairs):
            rows = message[_HEADER:].view(self.rows.dtype).view(-1, self.rows.shape[1])
            self.rows[torch.from_numpy(pairs)] = rows.to(self.rows.device)
        return status != _OK

    def _message(self, num_rows: int) -> torch.Tensor:
        size = _HEADER + num_rows * self.rows.shape[1] * self.rows.element_size()
        return torch.empty(size, dtype=torch.uint8, device=self._to)
