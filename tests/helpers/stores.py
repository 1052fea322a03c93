"""Stores that misbehave in ways a test chooses."""

import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from moecache.errors import StoreError
from moecache.layout import ExpertLayout
from moecache.stores import ExpertStore, MemoryStore
from moecache.stores.base import Parts


class WrappedStore:
    """Pass everything on; call `before_read` before each read, in the reading thread."""

    def __init__(self, store: ExpertStore, before_read: Callable[[int, int], None]) -> None:
        self.inner = store
        self.before_read = before_read
        self.reads: list[tuple[int, int]] = []

    @property
    def layout(self) -> ExpertLayout:
        """What the experts look like."""
        return self.inner.layout

    def read_into(self, layer: int, expert: int, out: Parts | np.ndarray) -> None:
        """Read after `before_read`, which may raise."""
        self.reads.append((layer, expert))
        self.before_read(layer, expert)
        self.inner.read_into(layer, expert, out)

    def view(self, layer: int, expert: int) -> dict[str, np.ndarray]:
        """Return one expert."""
        return self.inner.view(layer, expert)

    def regions(
        self, layers: Iterable[int] | None = None, *, held: np.ndarray | None = None
    ) -> Sequence[tuple[int, int]]:
        """Return the experts' regions."""
        return self.inner.regions(layers, held=held)

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Pass the hint on."""
        self.inner.prefetch(layer, experts)

    def close(self) -> None:
        """Close the store."""
        self.inner.close()


class FailEachOnce:
    """A `before_read` that lets the first read of every expert fail."""

    def __init__(self) -> None:
        self.failed: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def __call__(self, layer: int, expert: int) -> None:
        """Raise StoreError the first time."""
        with self._lock:
            is_first = (layer, expert) not in self.failed
            self.failed.add((layer, expert))
        if is_first:
            raise StoreError(f"expert {expert} of layer {layer} cannot be read")


class Gate:
    """A `before_read` that holds every reader until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)

    def __call__(self, layer: int, expert: int) -> None:
        """Announce the reader and wait."""
        self.entered.release()
        assert self.opened.wait(30)


def nothing(layer: int, expert: int) -> None:
    """Let every read pass."""


def numbered_store(num_layers: int = 3, num_experts: int = 8, top_k: int = 2) -> MemoryStore:
    """Return a store whose experts hold nothing but their own key, as float32."""
    keys = np.arange(num_layers * num_experts, dtype=np.float32)
    gate_up = np.broadcast_to(
        keys.reshape(num_layers, num_experts, 1, 1), (num_layers, num_experts, 4, 3)
    )
    down = np.broadcast_to(
        keys.reshape(num_layers, num_experts, 1, 1), (num_layers, num_experts, 3, 2)
    )
    return MemoryStore({"gate_up": gate_up, "down": down}, top_k=top_k)
