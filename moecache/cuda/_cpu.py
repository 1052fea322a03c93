"""CpuMisses: experts that are missing on a GPU, computed by the CPU where they are."""

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np

from moecache.cuda._launches import Step
from moecache.cuda._ring import CopyRing
from moecache.cuda.device import Device
from moecache.errors import MoeCacheError
from moecache.kernels import SlotKernel
from moecache.layout import ExpertLayout

# What is known of an expert's matrices is a few kilobytes, and takes 60 us to find out.
_MAX_KERNELS = 4096
_SLOT = np.zeros(1, np.int32)


class _Store(Protocol):
    @property
    def layout(self) -> ExpertLayout: ...
    def view(self, layer: int, expert: int) -> Mapping[str, np.ndarray]: ...
    def read_into(self, layer: int, expert: int, out: Any) -> None: ...


class _Split(Protocol):
    def choose(self, layer: int, ids: np.ndarray) -> list[int]: ...
    def note_cpu(self, ns: int, num_experts: int) -> None: ...
    def skip(self) -> None: ...
    def describe(self) -> str: ...


class CpuMisses:
    """Computes some of a step's missing experts while the GPU computes the others.

    By this project's kernels, from the store's own memory or the page cache, in a thread that
    waits for work. Of several threads that ask at a time one gets a part; the others have all
    their experts copied.

    Parameters
    ----------
    store : ExpertStore
        Of experts that are plain numbers, gate above up, without biases.
    activation : str
        A name that both `moecache.kernels` and the GPU's kernels know.
    split : MissSplit
        Which misses are the CPU's; told how long they took.
    clock : callable () -> int, optional
        Nanoseconds.
    """

    def __init__(
        self,
        store: _Store,
        activation: str,
        split: _Split,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.skip = split.skip
        self.describe = split.describe
        self._store = store
        self._activation = activation
        self._split = split
        self._clock = clock
        self._kernels: dict[tuple[int, int], SlotKernel] = {}
        self._busy = threading.Lock()  # from `begin` until both threads are done with a part
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        # The thread knows its queue alone, so that it ends with what it works for.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def begin(self, device: Device, step: Step, ids: np.ndarray) -> "CpuPart | None":
        """Return the CPU's part of a step, to be closed; `None` if it has none."""
        if self._closed or not self._busy.acquire(blocking=False):
            return None
        experts: list[int] = []
        try:
            experts = self._split.choose(step.layer, ids)
        finally:
            if not experts:
                self._busy.release()
        return CpuPart(self, device, step, ids, experts) if experts else None

    def close(self) -> None:
        """End the thread once it is done with what it computes; a second call does nothing."""
        self._closed = True
        self._jobs.put(None)
        self._kernels = {}

    def submit(self, layer: int, experts: list[int], hidden: np.ndarray, ids: np.ndarray) -> "_Job":
        """Begin to compute experts for some tokens."""
        flat, top_k = ids.reshape(-1), ids.shape[1]
        if hidden.dtype == np.float16:
            hidden = hidden.astype(np.float32)
        rows = np.empty((flat.size, hidden.shape[1]), np.float32)
        started = self._clock()

        def compute() -> None:
            for expert in experts:
                pairs = np.flatnonzero(flat == expert)
                offsets = np.array([0, len(pairs)])
                kernel = self._kernel(layer, expert)
                kernel.compute(hidden, _SLOT, offsets, pairs, top_k, rows)
            self._split.note_cpu(self._clock() - started, len(experts))

        job = _Job(compute, rows, self._busy.release)
        if self._thread is None or not self._thread.is_alive():
            self._start()
        self._jobs.put(job)
        return job

    def release(self) -> None:
        """Say that a part that nothing was submitted for is over."""
        self._busy.release()

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=_work, args=(self._jobs,), name="moecache-cpu-misses", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            # No thread can be made now: the caller computes it, once it has nothing else to do.
            self._thread = None

    def _kernel(self, layer: int, expert: int) -> SlotKernel:
        kernel = self._kernels.get((layer, expert))
        if kernel is not None:
            return kernel
        parts = self._store.view(layer, expert)
        if parts.keys() != {"gate_up", "down"}:
            # Gate and up are apart in the file: brought together in memory, for this once.
            roles = self._store.layout.layers[layer]
            parts = {role.name: np.empty(role.array_shape, role.dtype) for role in roles}
            self._store.read_into(layer, expert, parts)
            return SlotKernel(lambda _: parts, 1, activation=self._activation)
        kernel = SlotKernel(lambda _: parts, 1, activation=self._activation)
        if len(self._kernels) >= _MAX_KERNELS:
            self._kernels.pop(next(iter(self._kernels)), None)
        self._kernels[layer, expert] = kernel
        return kernel


class CpuPart:
    """What the CPU computes of one step; closed by the thread that issues the step.

    Attributes
    ----------
    experts : list of int
        That need not be loaded if they are missing.
    """

    def __init__(
        self, owner: CpuMisses, device: Device, step: Step, ids: np.ndarray, experts: list[int]
    ) -> None:
        self.experts = experts
        self._owner = owner
        self._device = device
        self._step = step
        self._ids = ids
        self._pairs = np.empty(0, np.int64)
        self._job: _Job | None = None

    def take(self, missing: list[int]) -> None:
        """Begin to compute those that are missing indeed; before anything of the step is issued.

        Waits for the stream, whose work so far the hidden states may be of.
        """
        step = self._step
        hidden = self._device.to_host(step.x).view(np.ndarray).view(step.dtype)
        self._pairs = np.flatnonzero(np.isin(self._ids.reshape(-1), missing))
        self._job = self._owner.submit(step.layer, missing, hidden, self._ids)

    def copy_up(self, rows: int, ring: CopyRing) -> None:
        """Wait for the results, and have them copied to their places among the step's rows.

        Parameters
        ----------
        rows : int
            Address of the rows on the device, float32 [num_pairs, hidden_size].
        ring : CopyRing

        Raises
        ------
        StoreError
            If an expert could not be read.
        MoeCacheError
            If the thread ended in the middle.
        """
        if self._job is None:
            return
        found = self._job.result()
        row_bytes = found.strides[0]
        ends = np.flatnonzero(np.diff(self._pairs) != 1) + 1
        for pairs in np.split(self._pairs, ends):
            first, last = int(pairs[0]), int(pairs[-1])
            ring.copy(rows + first * row_bytes, found[first : last + 1], self._step.stream)

    def close(self) -> None:
        """Let the next step have a part; what is still being computed is finished first."""
        if self._job is None:
            self._owner.release()
        else:
            self._job.close()


class _Job:
    """Work that one of two threads does: the one that waits for it, or the one that comes first.

    Its buffers are the next one's only when both are done with it.
    """

    def __init__(
        self, compute: Callable[[], None], rows: np.ndarray, over: Callable[[], None]
    ) -> None:
        self._compute = compute
        self._rows = rows
        self._over = over
        self._claim = threading.Lock()
        self._counting = threading.Lock()
        self._sides = 2
        self._done = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        """Do it, unless the other thread does."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._compute()
        except Exception as error:  # noqa: BLE001 - the step that waits raises it
            self._error = error
        except BaseException as error:
            self._error = MoeCacheError(
                f"what computes missing experts was ended by {type(error).__name__}; call again"
            )
            raise
        finally:
            self._done.set()
            self._leave()

    def result(self) -> np.ndarray:
        """Return the rows, once they are there; pairs of other experts have undefined ones."""
        self.run()
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._rows

    def close(self) -> None:
        """Say that nobody waits for it any more."""
        if self._claim.acquire(blocking=False):
            self._leave()
        self._leave()

    def _leave(self) -> None:
        with self._counting:
            self._sides -= 1
            is_last = not self._sides
        if is_last:
            self._over()


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    """Do what comes, until there is nothing more to come."""
    while (job := jobs.get()) is not None:
        job.run()
        del job  # what it holds need not wait for the next
