"""CudaSlots under a device that goes on as chance has it: no product ever sees a wrong expert.

Whatever is shown here by experts that are numbers: a slot evicted before the device came to use
it, a slot overwritten before, a buffer that the next read fills before it was copied, a copy in
one stream that overtakes an earlier one in the other.
"""

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moecache import ExpertLayout
from moecache.layout import Role
from moecache.slots import CudaSlots
from tests.helpers.examples import num_examples
from tests.helpers.fake_device import FakeDevice

NUM_SLOTS = 2
LAYOUT = ExpertLayout(
    8,
    2,
    [[Role("gate_up", (4, 3), np.dtype(np.float32)), Role("down", (3, 2), np.dtype(np.float16))]],
)


slots = st.integers(0, NUM_SLOTS - 1)


class SlotsMachine(RuleBasedStateMachine):
    """Leases, refills and computations in any order that a loader may choose."""

    @initialize(seed=st.integers(0, 2**16), buffers=st.integers(0, 3))
    def begin(self, seed: int, buffers: int) -> None:
        """Make a device of some temper."""
        self.device = FakeDevice(eager=False, seed=seed)
        stride = CudaSlots.bytes_per_slot(LAYOUT)
        self.pool = CudaSlots(
            LAYOUT, NUM_SLOTS, device=self.device, max_pinned_bytes=buffers * stride
        )
        self.streams = [self.device.create_stream() for _ in range(2)]
        self.number = [0] * NUM_SLOTS  # what each slot holds, once the device is so far
        self.leases: list[list[Any]] = [[] for _ in range(NUM_SLOTS)]  # of each slot, by stream
        self.lent: dict[int, dict[str, np.ndarray]] = {}
        self.next = 1
        self.wrong: list[tuple[str, int, int]] = []
        for slot in range(NUM_SLOTS):
            self.read(slot)
            self.upload(slot, behind=False, call=-1)

    @rule(slot=slots)
    def read(self, slot: int) -> None:
        """Begin to read into the buffer of a slot that no lease holds."""
        if not self.leases[slot] and slot not in self.lent:
            self.lent[slot] = self.pool.buffers(slot, 0)
            for part in self.lent[slot].values():
                part[...] = self.next
            self.next += 1

    @rule(slot=slots, behind=st.booleans(), call=st.just(-1) | st.integers(0, 7))
    def upload(self, slot: int, behind: bool, call: int) -> None:
        """Bring what was read into the slot, while a call of the device fails, or none."""
        if slot not in self.lent:
            return
        parts = self.lent.pop(slot)
        number = int(parts["gate_up"].flat[0])
        self.device.fail_at = call
        try:
            self.pool.upload(slot, 0, parts, behind=behind)
            self.number[slot] = number
        except MemoryError:
            self.number[slot] = 0
        self.device.fail_at = -1

    @rule(slot=slots)
    def reclaim(self, slot: int) -> None:
        """Give up what was read."""
        if self.lent.pop(slot, None) is not None:
            self.pool.reclaim(slot)

    @rule(slot=slots, behind=st.booleans())
    def refill(self, slot: int, behind: bool) -> None:
        """Read and upload at once, the leases over."""
        self.release(slot)
        self.read(slot)
        self.upload(slot, behind, -1)

    @rule(slot=slots, stream=st.integers(0, 1))
    def use(self, slot: int, stream: int) -> None:
        """Lease a slot in a stream, and issue a product that reads all of it."""
        if not self.number[slot] or slot in self.lent:
            return
        with self.device.using(self.streams[stream]):
            self.pool.before_compute(np.array([slot], np.int32))
            self.leases[slot].append(self.streams[stream])
        self.compute(slot)

    @rule(slot=slots)
    def compute(self, slot: int) -> None:
        """Issue one more product in every lease."""
        wanted = self.number[slot]
        arrays = self.pool.expert(slot, 0)

        def product() -> None:
            for name, array in arrays.items():
                if not np.all(array == wanted):
                    self.wrong.append((name, slot, wanted))

        for stream in self.leases[slot]:
            self.device.work(product, stream)

    @rule(slot=slots)
    def release(self, slot: int) -> None:
        """End all leases on a slot; it may be refilled at once."""
        if self.leases[slot]:
            self.leases[slot] = []
            self.pool.release_after_compute(np.array([slot], np.int32))

    @rule(moves=st.integers(1, 6))
    def go_on(self, moves: int) -> None:
        """Let the device make some moves."""
        self.device.run(moves)

    @invariant()
    def nothing_wrong_was_seen(self) -> None:
        """No product met another expert than its own, nor half of one."""
        if hasattr(self, "wrong"):
            assert not self.wrong

    def teardown(self) -> None:
        """Let the device end; nothing is left over."""
        if not hasattr(self, "device"):
            return
        self.device.run()
        assert not self.wrong
        assert self.device.num_queued == 0
        for slot in self.lent:
            self.pool.reclaim(slot)
        self.pool.close()
        assert self.device.pinned_bytes == self.device.used_bytes == self.device.num_events == 0


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=num_examples(100), stateful_step_count=40)
