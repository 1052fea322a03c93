"""Scratch: memory for intermediate results on a GPU."""

import contextlib

from moecache.cuda.device import Device, Memory, Stream
from moecache.errors import MoeCacheError
from moecache.interrupts import uninterrupted


class Scratch:
    """Memory for the intermediate results of one call at a time, in one stream; it is reused.

    Memory that a graph captured belongs to it: it is neither freed nor moved before `close`.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self.stream = stream
        self.grows = True
        self._device = device
        self._memory: dict[str, Memory] = {}
        self._captured: set[str] = set()
        self._kept: list[Memory] = []  # replaced by larger ones, but graphs write into them

    def room(self, name: str, num_bytes: int, limit: int | None = None) -> int:
        """Return a scratch address of at least `num_bytes`, zeros when they are new.

        Parameters
        ----------
        name : str
        num_bytes : int
        limit : int, optional
            Bytes beyond which none are taken for later.
        """
        memory = self._memory.get(name)
        if memory is None or memory.nbytes < num_bytes:
            if not self.grows:
                raise MoeCacheError("compute one step in this stream before capturing a graph")
            # A quarter on top: prompts get longer bit by bit.
            wanted = num_bytes if memory is None else num_bytes * 5 // 4
            if limit is not None:
                wanted = max(num_bytes, min(wanted, limit))
            with uninterrupted():
                self._memory[name] = self._device.allocate(wanted)
                if name in self._captured:
                    self._captured.discard(name)
                    self._kept.append(memory)  # type: ignore[arg-type]
                elif memory is not None:
                    self._free(memory)
        if not self.grows:
            self._captured.add(name)
        return self._memory[name].address

    def close(self) -> None:
        """Give all of it back, once the work issued in the stream is done."""
        with contextlib.ExitStack() as stack:
            while self._memory:
                stack.callback(self._free, self._memory.popitem()[1])
            while self._kept:
                stack.callback(self._free, self._kept.pop())

    def _free(self, memory: Memory) -> None:
        try:
            self._device.synchronize(self.stream)
        finally:
            self._device.free(memory)
