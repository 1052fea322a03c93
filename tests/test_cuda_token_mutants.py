"""Each wait, copy and flag of a token's steps is needed: without it a test notices."""

import contextlib
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import moecache.compute._steps as original
from moecache.cuda import Stream
from moecache.errors import CapacityError, MoeCacheError
from tests.helpers.cuda_tokens import EXPERTS, LAYERS, Model, expected, inputs, make_runtime
from tests.helpers.fake_device import FakeDevice

pytestmark = pytest.mark.nightly

TOKENS = inputs(8)
MUTANTS = {
    "slots are read before they are filled": (
        "runtime.pool.before_compute(fresh)",
        "pass",
    ),
    "the table is not copied": ("self._memory.copy_row(row, stream)", "pass"),
    "the gate is not opened for a token": (
        "self._memory.open_gate(0, self._token, stream)",
        "pass",
    ),
    "the gate is not opened again": ("self._memory.open_gate(layer, self._token, stream)", "pass"),
    "the gate opens for layers that are done": (
        "self._memory.open_gate(layer, self._token, stream)",
        "self._memory.open_gate(layer + 1, self._token, stream)",
    ),
    "the gate stays open": (
        "                self._memory.close_gate(stream)\n                self._device.rec",
        "                self._device.rec",
    ),
    "the next token's stream does not wait for the gate": (
        "            device.wait_event(stream, self._event)\n",
        "",
    ),
    "nothing stands for the gate that closes": (
        "                self._device.record(self._event, stream)\n                self._check",
        "                self._check",
    ),
    "memory is freed under a copy": ("stack.callback(_settle, device.wait_for, event)", "pass"),
    "the notice is not taken back": ("            self._notice[0] = 0\n", ""),
    "nobody looks for a miss": (
        "return int(self._notice[1]) if self.has_stalled else None",
        "return None",
    ),
    "nobody waits for the device": (
        "while not device.is_done(self._event) and not self.has_stalled:",
        "while False:",
    ),
    "the cache is not frozen": ("        self._residency.freeze(runtime)\n", ""),
    "the cache stays frozen": ("            self._residency.thaw(runtime)\n", ""),
    "the table is taken for up to date": ("if changes == self._changes:", "if self._changes >= 0:"),
    "a row that was not copied is taken for copied": (
        "self._table[row] = UNKNOWN\n",
        "pass\n",
    ),
    "the policy is not told": (
        "runtime.steps.count_hits(first + start,",
        "len(str(first + start)),(",
    ),
    "a step that missed is counted twice": ("self._counted = layer + 1", "self._counted = layer"),
    "tokens are not told apart": (
        "self._token = self._token % (2**31 - 1) + 1",
        "self._token = 1",
    ),
    "a token given up goes on": (
        "_settle(self._device.synchronize, stream)",
        "pass",
    ),
}


@pytest.fixture(scope="module", name="wanted")
def _wanted() -> list[np.ndarray]:
    return expected(TOKENS)


@contextlib.contextmanager
def mutated(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> Iterator[None]:
    """Exchange a piece of the module's text."""
    source = inspect.getsource(original)
    assert source.count(old) == 1, old
    module = types.ModuleType("moecache.compute._mutant")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        exec(compile(source.replace(old, new), "mutant", "exec"), module.__dict__)
        patch.setattr("moecache.compute.cuda_experts.TokenSteps", module.__dict__["TokenSteps"])
        yield


def check_tokens(wanted: list[np.ndarray], seed: int) -> None:
    """Run tokens beside leases of other streams, in a graph and not, on a device that is late."""
    device = FakeDevice(eager=False, seed=seed)
    with make_runtime(device, 9) as runtime:
        model = Model(runtime)
        other = device.create_stream()
        model.compute.begin_token()
        replay = model.capture()
        model.compute.end_token()
        rng = np.random.default_rng(seed)
        before = runtime.profiler.counts.sum()
        num_leased = 0
        everyone = np.tile(np.arange(EXPERTS), (LAYERS, 1))
        chosen: dict[bytes, list[np.ndarray]] = {}
        for number, hidden in enumerate(TOKENS):
            # What it will choose, if that is known, so that copies into its slots are not done.
            # They wait for long work that uses what is in them now.
            resident = [np.flatnonzero(slots >= 0) for slots in runtime.cache.slot_table]
            with contextlib.ExitStack() as leases:
                for layer, ids in enumerate(resident):
                    leases.enter_context(runtime.lease(layer, ids))
                    num_leased += ids.size
                for _ in range(30):
                    device.work(lambda: None)
            known = chosen.get(hidden.tobytes(), rng.permuted(everyone, axis=1)[:, :2])
            for layer, ids in enumerate(known):
                with device.using(other):
                    runtime.lease(layer, ids).close()
                num_leased += 2
            model.begin(hidden)
            step: int | None = model.compute.begin_token()
            rounds = itertools.count()
            while step is not None:
                assert next(rounds) <= LAYERS
                if number % 2:
                    replay()
                else:
                    for layer in range(step, LAYERS):
                        model.layer(layer)
                ids = rng.permutation(EXPERTS)[:2]
                with device.using(other), contextlib.suppress(CapacityError):
                    runtime.lease(int(rng.integers(LAYERS)), ids).close()
                    num_leased += 2
                step = model.compute.end_token()
            assert np.array_equal(model.result(), wanted[number])
            chosen[hidden.tobytes()] = [np.array(ids[0]) for ids in model.ids]
            assert runtime.cache.evicts
        model.compute.begin_token()  # a token without a step
        assert model.compute.end_token() is None
        told = runtime.profiler.counts.sum() - before
        assert told == len(TOKENS) * LAYERS * 2 + num_leased
        for out in model.out:
            out[...] = 7
        replay()
        device.run()
        assert all((out == 7).all() for out in model.out)
        with pytest.raises(MoeCacheError, match="outside"):
            model.compute.begin_token()
        device.synchronize(other)


def check_failures(wanted: list[np.ndarray]) -> None:
    """Fail copies of the table's rows one after the other, and close in the middle."""
    for number in range(4):
        device = FakeDevice(eager=False, seed=number)
        runtime = make_runtime(device, 6)
        model = Model(runtime)
        model.token(TOKENS[0])
        tokens = model.compute._tokens
        assert tokens is not None
        copy_row, calls = tokens.memory.copy_row, itertools.count()

        def fail(
            layer: int,
            stream: Stream,
            copy_row: Callable[[int, Stream], None] = copy_row,
            calls: Iterator[int] = calls,
            number: int = number,
        ) -> None:
            if next(calls) == number:
                raise MemoryError
            copy_row(layer, stream)

        tokens.memory.copy_row = fail  # type: ignore[method-assign]
        for token in (1, 1, 2, 1, 3, 1):
            for _ in range(2):
                with contextlib.suppress(MemoryError):
                    assert np.array_equal(model.token(TOKENS[token]), wanted[token])
        model.compute.begin_token()
        model.layer(0)
        runtime.close()
        device.run()


def check_streams(wanted: list[np.ndarray]) -> None:
    """Take turns in two streams, and wait for nothing but tokens; close behind the last."""
    for seed in range(4):
        device = FakeDevice(eager=False, seed=seed)
        with make_runtime(device, 9) as runtime:
            model = Model(runtime)
            streams = [device.current_stream(), device.create_stream()]
            for number, hidden in enumerate(TOKENS):
                with device.using(streams[number % 2]):
                    model.run(hidden)
                assert np.array_equal(np.array(model.hidden[LAYERS]), wanted[number])
        device.run()


def check_all(wanted: list[np.ndarray]) -> None:
    """Run everything that a mutant has to survive."""
    for seed in range(2):
        check_tokens(wanted, seed)
    check_failures(wanted)
    check_streams(wanted)


def test_nothing_is_wrong_without_a_mutation(wanted: list[np.ndarray]) -> None:
    """Or the others would prove nothing."""
    check_all(wanted)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_noticed(
    wanted: list[np.ndarray], mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By wrong bits, wrong counts, an error, or memory that is used after it was given back."""
    with (
        mutated(monkeypatch, *MUTANTS[mutant]),
        pytest.raises((AssertionError, pytest.fail.Exception, MoeCacheError, MemoryError)),
    ):
        check_all(wanted)
