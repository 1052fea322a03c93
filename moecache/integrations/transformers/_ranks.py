"""Ranks: the processes that a model's experts are spread over, as torch.distributed knows them."""

import json
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from moecache.decoding.streams import Stopped
from moecache.errors import ConfigError, MoeCacheError
from moecache.integrations.transformers._experts import NotCopied
from moecache.integrations.transformers._groups import (
    LOOK_S,
    let_go,
    make_groups,
    wait_in_slices,
)
from moecache.integrations.transformers._heartbeat import SILENT_S, Heartbeat
from moecache.layout import ExpertLayout
from moecache.ranks import Placement, Share

# A rank that loads is silent while one call into C keeps the GIL, such as to read a large tensor.
LOADING_SILENT_S = 10.0


class Ranks(NotCopied):
    """One process's part in a model whose experts are spread over several.

    Parameters
    ----------
    group : ProcessGroup
        The group of the processes that take part.
    timeout_s : float
        Seconds without an answer after which a rank counts as gone.
    device : torch.device
        The device of rows: on the CPU they go by gloo, on a GPU by NCCL.

    Attributes
    ----------
    rank, num_ranks : int
    group : ProcessGroup
        For the rows.
    share : Share or None
        This rank's experts, once `place` was called; `None` if it has everything.
    num_exchanges, num_early, sent_bytes, waited_ns : int
        Steps whose rows went to others, how many of them went in two parts, how much this rank
        sent, and how long it waited for the others' rows at the end of its own.
    """

    def __init__(self, group: Any, timeout_s: float, device: torch.device) -> None:
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.share: Share | None = None
        self.timeout_s = timeout_s
        self.num_exchanges = 0
        self.num_early = 0
        self.sent_bytes = 0
        self.waited_ns = 0
        # The leading rank calls this before each forward; see `Stopped`.
        self.stop_wanted: Callable[[], bool] = bool
        # This rank is in a "forward", "between" forwards, or has "left" the others' work.
        self.stage = "left"
        self._compared = False
        self._broken = ""
        self._closed = False
        self._lock = threading.Lock()
        name, self._control, self.group = make_groups(group, timeout_s, device)
        self.is_on_host = isinstance(self.group, dist.ProcessGroupGloo)
        store = dist.distributed_c10d._get_default_store()
        self._heartbeat = Heartbeat(store, name, self.rank, self.num_ranks, timeout_s)

    def place(self, layout: ExpertLayout, placement: Placement | None) -> None:
        """Find this rank's share of a model: by a placement, or by default an even one."""
        if placement is None:
            placement = Placement.even(layout.num_layers, layout.num_experts, self.num_ranks)
        if placement.num_ranks != self.num_ranks:
            raise ConfigError(
                f"the placement is for {placement.num_ranks} ranks, and there are "
                f"{self.num_ranks}; make one for as many by moecache plan-ranks"
            )
        if self.num_ranks > 1:
            self.share = Share(placement, self.rank)
            self.share.check(layout)

    def compare(self, facts: Mapping[str, object]) -> None:
        """Raise ConfigError on every rank if not all have the same facts; waits for all of them.

        Raises
        ------
        MoeCacheError
            If a rank failed before it came here, or does not come.
        """
        self._compared = True
        silent_s = max(self.timeout_s, LOADING_SILENT_S)
        found = self.gather(dict(facts), "while the ranks were compared", silent_s)
        # All are there: from now on it is a step that is waited for.
        self._control._set_default_timeout(timedelta(seconds=self.timeout_s))
        failed = [
            f"rank {rank}: {one['failed']}" for rank, one in enumerate(found) if "failed" in one
        ]
        if failed:
            raise MoeCacheError(f"the model was not loaded on all ranks; {'; '.join(failed)}")
        for name in facts:
            values = [one.get(name) for one in found]
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise ConfigError(
                        f"ranks differ in {name}: rank 0 has {values[0]!s:.200}, rank {rank} has "
                        f"{value!s:.200}; give all of them the same"
                    )

    def gather(
        self, value: object, when: str = "for the others' figures", silent_s: float | None = None
    ) -> list[Any]:
        """Return on every rank what each one gave, as JSON; waits for all of them.

        With `silent_s` also looks meanwhile whether all still give signs of life: they may take
        longer than one may be silent.
        """
        self.check()

        def look() -> None:
            if silent_s is not None:
                self.look(when, silent_s)

        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        try:
            sizes = self._gathered(torch.tensor([len(text)]), look)
            mine = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
            mine[: len(text)] = torch.from_numpy(text.copy())
            found = self._gathered(mine, look)
        except RuntimeError as error:
            raise self.lost(when, error) from error
        return [
            json.loads(one[: int(size)].numpy().tobytes())
            for one, size in zip(found, sizes, strict=True)
        ]

    def _gathered(
        self, mine: torch.Tensor, look: Callable[[], object] = bool
    ) -> list[torch.Tensor]:
        """Return a tensor of each rank, all of one size and on the host."""
        found = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        wait_in_slices(self._control.allgather([found], [mine]), look)
        return found

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank's model was not loaded, and close."""
        text = _told(error)
        try:
            if isinstance(error, Exception) and not self._compared:
                self.compare({"failed": text})
        except MoeCacheError:
            pass  # it is what was told
        self.close(text)

    def agree(self, tokens: torch.Tensor, num_held: int) -> None:
        """Raise on every rank if not all go on with the same tokens, or one shall not go on.

        Raises
        ------
        MoeCacheError
            If tokens differ, or a rank does not come, or has left a generation.
        Stopped
            If `stop_wanted` of rank 0 says so.
        """
        self.check()
        digest = zlib.crc32(tokens.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        # First: an interrupt may come once the others have gone on.
        self.stage = "forward"
        found = self._agreed([digest, tokens.numel(), num_held, int(self.stop_wanted())])
        self.stage = "left"
        if found[0][3]:
            raise Stopped
        for rank, theirs in enumerate(found):
            if theirs[3]:
                raise MoeCacheError(
                    f"rank {rank} does not go on with this text; rank {rank}: "
                    f"{self._heartbeat.said(rank)}"
                )
        for rank, theirs in enumerate(found):
            if not torch.equal(theirs[:3], found[0][:3]):
                raise MoeCacheError(
                    f"rank {rank} goes on with other tokens than rank 0 ({int(theirs[1])} after "
                    f"{int(theirs[2])} and {int(found[0][1])} after {int(found[0][2])}); give "
                    "every rank the same prompt, and the same seed where tokens are sampled"
                )
        self.stage = "forward"

    def leave(self, error: BaseException | None = None) -> None:
        """End a generation that a command began on every rank, so that none waits for this one.

        After its last forward, or an error before the next one. A failure of all ranks has ended
        it on all; after one in this rank's forward they end, as rows are missing.

        Raises
        ------
        MoeCacheError
            If a rank does not come.
        """
        if self._broken or self.stage == "left":
            return
        if self.stage == "forward":
            self.fail(error or MoeCacheError("a forward did not end"))
            return
        if isinstance(error, Exception):
            self.tell(error)
        self.stage = "left"
        self._agreed([0, 0, 0, 1])

    def _agreed(self, mine: list[int]) -> list[torch.Tensor]:
        """Return what every rank says of its tokens, and whether it ends."""
        try:
            return self._gathered(torch.tensor(mine))
        except RuntimeError as error:
            raise self.lost("before a forward", error) from error

    @property
    def are_gone(self) -> bool:
        """Whether nothing can be exchanged any more."""
        return bool(self._broken)

    def check(self) -> None:
        """Raise MoeCacheError if a rank was lost before."""
        if self._broken:
            raise MoeCacheError(f"{self._broken}; start all ranks again")

    def send(self, message: torch.Tensor, rank: int) -> Any:
        """Begin to send bytes to a rank; return what can be waited for."""
        try:
            return self.group.send([message], rank, 0)
        except RuntimeError as error:
            # A connection that has ended is an error before anything is waited for.
            raise self.lost(f"to send rows to rank {rank}", error) from error

    def receive(self, message: torch.Tensor, rank: int) -> Any:
        """Begin to receive bytes from a rank; return what can be waited for."""
        try:
            return self.group.recv([message], rank, 0)
        except RuntimeError as error:
            raise self.lost(f"for rows of rank {rank}", error) from error

    def begin_gather(self, found: list[torch.Tensor], mine: torch.Tensor) -> Any:
        """Begin to gather a small tensor of each rank; return what can be waited for."""
        try:
            return self.group.allgather([found], [mine])
        except RuntimeError as error:
            raise self.lost("to say which rows come first", error) from error

    def wait(self, work: Any) -> None:
        """Wait for what was begun."""
        try:
            if self.is_on_host:
                wait_in_slices(work)
            else:
                work.wait()
        except RuntimeError as error:
            raise self.lost("for the other ranks", error) from error

    def tell(self, error: Exception) -> None:
        """Say what failed here, before the others are told that something did."""
        self.stage = "left"
        self._heartbeat.say(_told(error))

    def failed(self, ranks: list[int], layer: int) -> MoeCacheError:
        """Return the error of a step that failed on other ranks; all can go on after it."""
        self.stage = "left"
        told = "; ".join(f"rank {rank}: {self._heartbeat.said(rank)}" for rank in ranks)
        return MoeCacheError(f"layer {layer} was not computed on all ranks; {told}")

    def parted(self, rank: int, layer: int) -> MoeCacheError:
        """Return the error of ranks whose routers chose differently; they cannot go on."""
        self._broken = (
            f"rank {rank} chose other experts at layer {layer} than rank {self.rank}: their "
            "products are rounded differently; give all ranks processors with the same "
            "instructions, the same torch and the same number of threads"
        )
        self.close(self._broken)
        return MoeCacheError(self._broken)

    def post(self, number: int, order: str) -> None:
        """Tell the other ranks what to do next; see `follow`."""
        try:
            self._heartbeat.post(f"order/{number}", order)
            # Every rank has read the one before the last, as it was carried out by all.
            self._heartbeat.remove(f"order/{number - 2}")
        except (RuntimeError, OSError) as error:
            raise self.lost("to tell the others what to do", error) from error

    def order(self, number: int) -> str:
        """Wait for what rank 0 says to do next, for as long as it lives."""
        began = looked = time.monotonic()
        while True:
            self.check()
            try:
                found = self._heartbeat.posted(f"order/{number}")
            except (RuntimeError, OSError) as error:
                raise self.lost("for what to do next", error) from error
            now = time.monotonic()
            if found is not None:
                return found
            if now - looked > LOOK_S:
                looked = now
                self.look("for what to do next")
            # An order's answer takes longer; one that waits for hours takes little of a core.
            time.sleep(min(0.05, 0.002 + (now - began) / 20))

    def look(self, when: str = "for something to do", silent_s: float | None = None) -> None:
        """Raise MoeCacheError if a rank has ended, or gave no sign of life for `silent_s`.

        By default for `timeout_s`, after which a store that does not answer is an error, too.

        To be called every few seconds, by one thread at a time.
        """
        self.check()
        try:
            who = self._heartbeat.missing(self.timeout_s if silent_s is None else silent_s)
        except (RuntimeError, OSError) as error:
            raise self.lost(when, error) from error
        if who:
            raise self.lost(when, who=who)

    def note(self) -> None:
        """Count an exchange that this rank has come to."""
        self.num_exchanges += 1
        self._heartbeat.note(self.num_exchanges)

    def lost(self, when: str, error: BaseException | None = None, who: str = "") -> MoeCacheError:
        """Return the error of a rank that did not answer; nothing is exchanged from now on."""
        with self._lock:
            if not self._broken:
                who = who or self._heartbeat.diagnose(SILENT_S)
                self._broken = f"rank {self.rank} waited in vain {when}: {who}"
                self._heartbeat.end(f"stopped, as {who}")
                if self.rank == 0:
                    # As in `close`: the others find out who is gone where this process keeps it.
                    self._heartbeat.wait_for_others(SILENT_S + 1)
        why = "" if error is None else f" ({str(error).splitlines()[0]:.200})"
        return MoeCacheError(f"{self._broken}; start all ranks again{why}")

    def close(self, reason: str = "") -> None:
        """Leave the ranks; a second call does nothing. The others' next exchange fails."""
        if self._closed:
            return
        self._closed = True
        self._heartbeat.end(reason)
        self._broken = self._broken or "this rank's model is closed"
        self._disconnect()
        if reason and self.rank == 0:
            # The store may be in this process: the others ask there what became of it.
            self._heartbeat.wait_for_others(SILENT_S)
        self._heartbeat.close()

    def _disconnect(self) -> None:
        """End all connections, so that whoever waits for this rank is told at once.

        They end with the last reference to the groups: no frame may have one.
        """
        groups = [self.group, self._control]
        del self.group, self._control
        let_go(groups)

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Tell the others of an error; nothing otherwise."""
        if error is not None:
            self.fail(error)


def _told(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    return f"it failed: {type(error).__name__}: {error!s:.500}"
