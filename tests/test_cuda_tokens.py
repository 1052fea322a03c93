"""Steps of a token that the device takes itself: the same bits, and the host waits for nothing."""

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moecache.compute import cuda_experts
from moecache.compute._residency import residency_of
from moecache.cuda import open_device
from moecache.errors import CapacityError, ConfigError, MoeCacheError, StoreError
from tests.helpers.cuda_tokens import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    TOP_K,
    Model,
    expected,
    inputs,
    make_runtime,
)
from tests.helpers.examples import num_examples
from tests.helpers.fake_device import FakeDevice
from tests.helpers.nightly import some
from tests.helpers.runtimes import close_beside
from tests.test_cuda_experts import on

ALL = LAYERS * EXPERTS
TOKENS = inputs(12)


@pytest.fixture(params=["eager", "late", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a device made for tests, and then a real one in a stream that can be captured."""
    if request.param != "cuda:0":
        yield FakeDevice(eager=request.param == "eager", seed=len(request.node.name))
        return
    try:
        gpu = open_device(request.param)
    except MoeCacheError as error:
        pytest.skip(str(error))
    stream = gpu.create_stream()
    with gpu.using(stream):
        yield gpu
        gpu.synchronize(stream)
    gpu.destroy_stream(stream)


@pytest.fixture(scope="module")
def on_fake() -> list[np.ndarray]:
    """Return what all resident experts give on devices made for tests."""
    return expected(TOKENS)


@pytest.fixture
def wanted(request: pytest.FixtureRequest, on_fake: list[np.ndarray]) -> list[np.ndarray]:
    """Return what all resident experts give on the test's device."""
    if "device" not in request.fixturenames:
        return on_fake
    device = request.getfixturevalue("device")
    # A GPU's own tanh may round otherwise, and the router is one more sum.
    return on_fake if isinstance(device, FakeDevice) else expected(TOKENS, device=device)


def assert_same(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    """Assert that every token has the same bits."""
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert np.array_equal(one.view(np.uint32), other.view(np.uint32)), number


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 15, ALL])
def test_a_tokens_steps_have_the_bits_of_resident_ones(
    device: Any, wanted: list[np.ndarray], capacity: int
) -> None:
    """However many experts are missed, and however late the device is."""
    with make_runtime(device, capacity) as runtime:
        model = Model(runtime)
        assert_same([model.token(hidden) for hidden in TOKENS], wanted)
        assert runtime.cache.evicts
        runtime.cache.check()
        assert runtime.stats().num_steps == LAYERS * len(TOKENS)
    if isinstance(device, FakeDevice):
        assert device.used_bytes == device.pinned_bytes == device.num_events == 0


@pytest.mark.parametrize("policy", ["echo", "slru", "lfu"])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_policies_learn_what_was_chosen(wanted: list[np.ndarray], policy: str, scope: str) -> None:
    """Every access is counted once and in order: the same experts are evicted as by live steps."""
    counts = []
    for way in ("plain", "token"):
        with make_runtime(FakeDevice(), 12, policy=policy, scope=scope) as runtime:
            model = Model(runtime)
            assert_same([getattr(model, way)(hidden) for hidden in TOKENS], wanted)
            counts.append((runtime.profiler.counts.copy(), runtime.cache.slot_table.copy()))
    for one, other in zip(*counts, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("num_tokens", [2, 4])
def test_several_tokens_at_a_time(device: Any, num_tokens: int) -> None:
    """Up to four rows; where their experts have no room together, waves take the step."""
    tokens = inputs(6, num_tokens)
    wanted = expected(tokens, device=device)
    for capacity in (2, 9, ALL):
        with make_runtime(device, capacity) as runtime:
            model = Model(runtime, num_tokens)
            assert_same([model.token(hidden) for hidden in tokens], wanted)


def test_hits_wait_for_nothing(wanted: list[np.ndarray]) -> None:
    """A launch per layer, and no look at the host's tables or the ids."""
    device = FakeDevice(eager=False)
    with make_runtime(device, ALL - 1) as runtime:
        model = Model(runtime)
        model.token(TOKENS[0])
        device.num_waits = 0
        device.num_launches.clear()
        model.begin(TOKENS[0])
        first = model.compute.begin_token()
        for layer in range(first, LAYERS):
            model.layer(layer)
        assert device.num_waits == 0
        assert device.num_launches == {"decode_f32": LAYERS}
        assert not model.compute.has_stalled
        assert model.compute.end_token() is None
        assert_same([model.result()], wanted[:1])


@pytest.mark.parametrize("capacity", [3, 9, 16, ALL])
def test_one_graph_has_a_whole_token(device: Any, wanted: list[np.ndarray], capacity: int) -> None:
    """Issued again where experts were missed; layers before that keep their results."""
    with make_runtime(device, capacity) as runtime:
        model = Model(runtime)
        model.compute.begin_token()
        replay = model.capture()
        assert model.compute.end_token() is None
        assert_same([model.replayed(hidden, replay) for hidden in TOKENS], wanted)
        # In between, other steps may evict what they like.
        assert_same([model.plain(hidden) for hidden in TOKENS[:3]], wanted[:3])
        assert_same([model.replayed(hidden, replay) for hidden in TOKENS], wanted)


def test_graphs_of_single_layers_go_on_from_the_one_that_missed(
    device: Any, wanted: list[np.ndarray]
) -> None:
    """Nothing before it is issued again."""
    with make_runtime(device, 9) as runtime:
        model = Model(runtime)
        model.compute.begin_token()
        graphs = [model.capture(layer, layer + 1) for layer in range(LAYERS)]
        model.compute.end_token()
        found, num_stalls = [], 0
        for hidden in TOKENS:
            model.begin(hidden)
            first: int | None = model.compute.begin_token()
            while first is not None:
                for replay in graphs[first:]:
                    replay()
                first = model.compute.end_token()
                num_stalls += first is not None
            found.append(model.result())
        assert num_stalls > 3
        assert_same(found, wanted)


def test_a_graph_that_runs_outside_of_a_token_is_told(
    device: Any, wanted: list[np.ndarray]
) -> None:
    """It reads no slot; the next token says so, and the one behind it goes on."""
    with make_runtime(device, 9) as runtime:
        model = Model(runtime)
        model.compute.begin_token()
        replay = model.capture()
        model.compute.end_token()
        model.begin(TOKENS[0])
        device.synchronize(device.current_stream())
        for out in model.out:
            out[...] = 7
        replay()
        assert all((device.to_host(out) == 7).all() for out in model.out)
        with pytest.raises(MoeCacheError, match=r"outside of begin_token"):
            model.compute.begin_token()
        assert runtime.cache.evicts
        assert_same([model.replayed(TOKENS[0], replay)], wanted[:1])


def test_a_graph_needs_slots_for_a_steps_experts() -> None:
    """Said when it is captured, or when it asks for more at once than there are."""
    with make_runtime(FakeDevice(), 1) as runtime:
        model = Model(runtime)
        model.compute.begin_token()
        with pytest.raises(CapacityError, match="the cache has 1; raise the memory"):
            model.capture()
        assert runtime.cache.evicts is False
        assert model.compute.end_token() is None
        assert runtime.cache.evicts
    with make_runtime(FakeDevice(), 2) as runtime:
        model = Model(runtime, 4)
        tokens = inputs(1, 4)
        model.compute.begin_token()
        replay = model.capture()
        model.compute.end_token()
        with pytest.raises(CapacityError, match="without a graph"):
            model.replayed(tokens[0], replay)
        assert_same([model.token(tokens[0])], expected(tokens))


def test_wrong_ids_make_their_rows_nan(device: Any) -> None:
    """They are no misses, and no accesses."""
    with make_runtime(device, 9) as runtime:
        model = Model(runtime, 2)
        rng = np.random.default_rng(0)
        hidden = rng.normal(size=(2, HIDDEN)).astype(np.float32)
        chosen = np.array([[0, 1], [EXPERTS, -1]])
        x, ids, weights = on(device, hidden, chosen, np.ones((2, TOP_K), np.float32))
        first: int | None = model.compute.begin_token()
        while first is not None:
            out = model.compute(0, x, ids, weights)
            first = model.compute.end_token()
        found = device.to_host(out)
        assert np.isnan(found[1]).all()
        assert np.isfinite(found[0]).all()
        assert runtime.profiler.counts.sum() == 2


def test_ids_of_the_host_are_checked() -> None:
    """A wrong one is an error, and the token goes on."""
    device = FakeDevice(eager=False)
    with make_runtime(device, 9) as runtime:
        model = Model(runtime)
        model.begin(TOKENS[0])
        x, weights = model.hidden[0], np.ones((1, TOP_K), np.float32).view(type(model.out[0]))
        model.compute.begin_token()
        with pytest.raises(ValueError, match=f"expert {EXPERTS} is not in"):
            model.compute(0, x, [[0, EXPERTS]], weights)
        out = model.compute(0, x, [[0, 1]], weights)
        assert model.compute.end_token() == 0
        out = model.compute(0, x, [[0, 1]], weights)
        assert model.compute.end_token() is None
        assert np.array_equal(out, device.to_host(model.compute(0, x, [[0, 1]], weights)))


def test_other_arrays_in_the_same_places_are_other_steps() -> None:
    """A launch is issued again for the same places, shapes and types alone."""
    device = FakeDevice()
    with make_runtime(device, ALL) as runtime:
        runtime.usage.fill().wait()
        model = Model(runtime)
        wide = model.ids[0]
        wide[...] = [[3, 1]]
        narrow = wide.view(np.int32)[:, :2]  # expert 3, and 0 in the upper half
        x, weights, out = model.hidden[0], model.weights[0], model.out[0]
        x[...] = 1
        weights[...] = 1
        wanted = [np.array(model.compute(0, x, ids, weights)) for ids in (wide, narrow)]
        assert not np.array_equal(*wanted)
        model.compute.begin_token()
        assert model.compute.end_token() is None
        model.compute.begin_token()
        for _ in range(2):
            for ids, one in zip((wide, narrow), wanted, strict=True):
                assert np.array_equal(model.compute(0, x, ids, weights, out=out), one)
        assert model.compute.end_token() is None


def test_what_is_no_token_is_refused() -> None:
    """Each with what to do."""
    device = FakeDevice()
    with make_runtime(device, 9) as runtime:
        model = Model(runtime)
        compute = model.compute
        for _ in range(2):
            with pytest.raises(MoeCacheError, match="call begin_token first"):
                compute.end_token()
            assert compute.begin_token() == 0
            assert compute.end_token() is None
        compute.begin_token()
        large = Model(runtime, 5)
        with pytest.raises(ConfigError, match="compute prompts before"):
            large.layer(0)
        with device.using(device.create_stream()):
            with pytest.raises(ConfigError, match="the stream in which it began"):
                model.layer(0)
            with pytest.raises(ConfigError, match="in the stream in which it began"):
                compute.end_token()
        with device.capturing():
            for call in (compute.begin_token, compute.end_token):
                with pytest.raises(MoeCacheError, match="not in the graph"):
                    call()
        assert_same([model.token(TOKENS[0])], expected(TOKENS[:1]))
        assert runtime.cache.evicts


def test_a_token_that_is_not_ended_is_given_up(wanted: list[np.ndarray]) -> None:
    """By the next one: after an exception of the loop, say."""
    for eager in (True, False):
        with make_runtime(FakeDevice(eager=eager), 9) as runtime:
            model = Model(runtime)
            for layers in range(LAYERS + 1):
                model.begin(TOKENS[1])
                model.compute.begin_token()
                for layer in range(layers):
                    model.layer(layer)
                assert_same([model.token(TOKENS[0])], wanted[:1])
            assert runtime.cache.evicts


def test_one_thread_at_a_time_has_a_token(wanted: list[np.ndarray]) -> None:
    """The other is told; its steps outside of a token go on, and evict nothing meanwhile."""
    device = FakeDevice()
    with make_runtime(device, 9) as runtime:
        model, other = Model(runtime), Model(runtime)
        model.token(TOKENS[0])
        model.begin(TOKENS[1])
        first = model.compute.begin_token()
        found: list[Any] = []

        def work() -> None:
            try:
                other.compute.begin_token()
            except MoeCacheError as error:
                found.append(str(error))
            found.append(other.plain(TOKENS[2]))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        assert "another thread's token is open" in found[0]
        step: int | None = first
        while step is not None:
            for layer in range(step, LAYERS):
                model.layer(layer)
            step = model.compute.end_token()
        assert_same([model.result(), found[1]], wanted[1:3])


@pytest.mark.parametrize("seed", range(num_examples(6)))
def test_other_threads_compute_beside_tokens(wanted: list[np.ndarray], seed: int) -> None:
    """Steps outside of tokens, in a stream of their own, with few slots."""
    device = FakeDevice(eager=False, seed=seed)
    with make_runtime(device, 7, loader_threads=1, prefetch="echo") as runtime:
        model, other = Model(runtime), Model(runtime)
        found: list[np.ndarray] = []

        def work() -> None:
            with device.using(device.create_stream()):
                found.extend(other.plain(hidden) for hidden in TOKENS[:6])

        thread = threading.Thread(target=work)
        thread.start()
        mine = [model.token(hidden) for hidden in TOKENS]
        thread.join(60)
        assert_same(mine, wanted)
        assert_same(found, wanted[:6])
        assert runtime.cache.evicts


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("layers", [0, 2])
def test_a_runtime_may_be_closed_in_the_middle_of_a_token(eager: bool, layers: int) -> None:
    """Nothing runs on, nothing stays, and what comes later is told."""
    device = FakeDevice(eager=eager)
    runtime = make_runtime(device, 9)
    model = Model(runtime)
    model.token(TOKENS[0])
    model.compute.begin_token()
    for layer in range(layers):
        model.layer(layer)
    runtime.close()
    assert device.used_bytes == device.pinned_bytes == device.num_events == 0
    for call in (model.compute.begin_token, model.compute.end_token):
        with pytest.raises(MoeCacheError, match="closed"):
            call()


def test_an_expert_that_cannot_be_read_ends_the_token(
    wanted: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error reaches the caller; the next token is right."""
    with make_runtime(FakeDevice(eager=False), 9) as runtime:
        model = Model(runtime)
        model.token(TOKENS[0])

        def fail(*_: object) -> None:
            raise StoreError("the disk is gone")

        with monkeypatch.context() as patch:
            patch.setattr(runtime.store, "read_into", fail)
            patch.setattr(runtime.store, "view", fail)
            with pytest.raises(StoreError, match="the disk is gone"):
                for hidden in TOKENS:
                    model.token(hidden)
        assert runtime.cache.evicts
        assert_same([model.token(hidden) for hidden in TOKENS], wanted)


@pytest.mark.parametrize("eager", some([True, False], lambda eager: not eager))
def test_any_call_of_the_device_may_fail(wanted: list[np.ndarray], eager: bool) -> None:
    """The token that it hits fails, the next one is right, and everything is given back."""
    failed = number = 0
    while True:
        device = FakeDevice(eager=eager, seed=number)
        runtime = make_runtime(device, 7)
        model = Model(runtime)
        device.fail_at = number
        try:
            for token in range(3):
                assert_same([model.token(TOKENS[token])], wanted[token : token + 1])
        except MemoryError:
            failed += 1
        hit, device.fail_at = device.fail_at < 0, -1
        assert_same([model.token(hidden) for hidden in TOKENS[:2]], wanted[:2])
        assert runtime.cache.evicts
        runtime.cache.check()
        runtime.close()
        assert device.used_bytes == device.pinned_bytes == device.num_events == 0, number
        if not hit:
            break
        number += 1 if number < 16 else 13
    assert failed > 14


def test_a_lost_device_is_an_error_and_thaws(wanted: list[np.ndarray]) -> None:
    """Nothing hangs."""
    device = FakeDevice(eager=False)
    runtime = make_runtime(device, 9)
    model = Model(runtime)
    model.token(TOKENS[0])
    model.compute.begin_token()
    device.lost = True
    with pytest.raises(MoeCacheError, match="lost"):
        model.compute.end_token()
    assert runtime.cache.evicts
    with pytest.raises(MoeCacheError, match="lost"):
        runtime.close()


@pytest.mark.parametrize("capacity", [9, ALL])
def test_tokens_in_turns_in_two_streams(wanted: list[np.ndarray], capacity: int) -> None:
    """The gate that one closes behind it closes before the other opens it."""
    for seed in range(num_examples(6)):
        device = FakeDevice(eager=False, seed=seed)
        with make_runtime(device, capacity) as runtime:
            model = Model(runtime)
            streams = [device.current_stream(), device.create_stream()]
            for number, hidden in enumerate(TOKENS):
                with device.using(streams[number % 2]):
                    model.run(hidden)
                # Nothing but `end_token` waited for it.
                assert np.array_equal(np.array(model.hidden[LAYERS]), wanted[number]), number
            device.synchronize(streams[1])


@pytest.mark.parametrize("drops", [False, True])
def test_nothing_is_freed_before_the_gate_is_closed(drops: bool) -> None:
    """`end_token` does not wait for that; nor is anything left where `close` is forgotten."""
    for seed in range(4):
        device = FakeDevice(eager=False, seed=seed)
        runtime = make_runtime(device, 9)
        model = Model(runtime)
        model.run(TOKENS[0])
        assert device.num_queued
        if drops:
            tokens = weakref.ref(model.compute._tokens)
            model.compute._tokens = None
            gc.collect()
            assert tokens() is None
        runtime.close()
        device.run()
        assert device.used_bytes == device.pinned_bytes == device.num_events == 0


def test_a_thread_that_ended_holds_no_token(wanted: list[np.ndarray]) -> None:
    """Or nobody could begin another."""
    with make_runtime(FakeDevice(), 9) as runtime:
        model = Model(runtime)
        thread = threading.Thread(target=model.compute.begin_token)
        thread.start()
        thread.join()
        assert not runtime.cache.evicts
        assert_same([model.token(hidden) for hidden in TOKENS], wanted)
        assert runtime.cache.evicts


@pytest.mark.parametrize("way", ["lease", "step"])
def test_what_lacks_slots_gives_up_the_token_of_a_thread_that_ended(
    wanted: list[np.ndarray], way: str
) -> None:
    """Not only the next token: a program may begin none."""
    device = FakeDevice(eager=False)
    with make_runtime(device, 9) as runtime:
        model = Model(runtime)
        model.compute.begin_token()
        replay = model.capture()
        model.compute.end_token()
        for hidden in TOKENS:
            model.plain(hidden)
        assert runtime.cache.num_resident == 9

        def leave() -> None:
            model.begin(TOKENS[0])
            model.compute.begin_token()
            for layer in range(LAYERS):
                model.layer(layer)

        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert not runtime.cache.evicts
        if way == "lease":
            runtime.lease(0, np.arange(EXPERTS)).close()
            assert runtime.cache.num_resident == 9
        assert_same([model.plain(hidden) for hidden in TOKENS], wanted)
        assert runtime.cache.evicts
        replay()
        device.run()
        with pytest.raises(MoeCacheError, match="outside of begin_token"):
            model.compute.begin_token()
        assert_same([model.token(hidden) for hidden in TOKENS], wanted)
    assert device.used_bytes == device.pinned_bytes == device.num_events == 0


def test_a_thread_has_no_token_of_one_that_ended(wanted: list[np.ndarray]) -> None:
    """Though it may have the other's number: its steps would wait for nothing that they miss."""
    with make_runtime(FakeDevice(), 9) as runtime:
        model = Model(runtime)
        thread = threading.Thread(target=model.compute.begin_token)
        thread.start()
        thread.join()
        tokens = model.compute._tokens
        assert tokens is not None
        tokens._owner = threading.get_ident()
        assert not tokens.is_open
        with pytest.raises(MoeCacheError, match="call begin_token first"):
            model.compute.end_token()
        assert_same([model.plain(hidden) for hidden in TOKENS], wanted)
        assert runtime.cache.evicts


def test_a_lease_leaves_the_token_of_a_thread_that_lives() -> None:
    """It lacks slots then."""
    with make_runtime(FakeDevice(), 9) as runtime:
        model = Model(runtime)
        for hidden in TOKENS:
            model.plain(hidden)
        model.compute.begin_token()
        with pytest.raises(CapacityError):
            runtime.lease(0, np.arange(EXPERTS))
        assert model.compute.end_token() is None


def test_a_miss_beside_another_frozen_token_says_so() -> None:
    """It is not that the cache is too small."""
    with make_runtime(FakeDevice(), 9) as runtime:
        model = Model(runtime)
        for hidden in TOKENS[:4]:
            model.token(hidden)
        residency_of(runtime).freeze(runtime)
        with pytest.raises(CapacityError, match="another token of this runtime is open"):
            for hidden in inputs(20, seed=9):
                model.token(hidden)
        residency_of(runtime).thaw(runtime)
        assert runtime.cache.evicts


def test_close_beside_a_long_wait_frees_nothing_that_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call that waits ends with an error, and frees it."""
    monkeypatch.setattr(cuda_experts, "_CLOSE_TIMEOUT_S", 0.05)
    device = FakeDevice(eager=False)
    runtime = make_runtime(device, ALL)
    model = Model(runtime)
    model.run(TOKENS[0])
    is_over, began = threading.Event(), threading.Event()
    problems: list[BaseException] = []

    def run() -> None:
        device.work(is_over.wait)
        model.compute.begin_token()
        model.layer(0)
        began.set()
        try:
            model.compute.end_token()
        except MoeCacheError as error:
            problems.append(error)

    monkeypatch.setattr(device, "is_done", lambda event: False)
    thread = threading.Thread(target=run)
    thread.start()
    began.wait()
    closing = threading.Thread(target=model.compute.close)
    closing.start()
    closing.join(0.5)
    is_over.set()
    closing.join()
    thread.join()
    monkeypatch.undo()
    runtime.close()
    assert ["closed" in str(problem) for problem in problems] == [True]
    assert device.used_bytes == device.pinned_bytes == device.num_events == 0


@pytest.mark.parametrize("seed", range(num_examples(6)))
def test_a_runtime_may_be_closed_beside_tokens(seed: int) -> None:
    """By another thread, at any moment: the loop is told, and nothing stays."""
    device = FakeDevice(eager=bool(seed % 2), seed=seed)
    runtime = make_runtime(device, 7)
    model = Model(runtime)
    close_beside(runtime, lambda turn: model.token(TOKENS[turn % len(TOKENS)]), 0.003 * seed)
    device.run()
    assert device.used_bytes == device.pinned_bytes == device.num_events == 0


def test_either_the_last_call_or_close_frees_what_tokens_have() -> None:
    """Never both: one would use what the other has freed."""
    device = FakeDevice()
    runtime = make_runtime(device, 7)
    model = Model(runtime)
    model.token(TOKENS[0])
    compute, tokens = model.compute, model.compute._tokens
    assert tokens is not None
    close, closed = tokens.close, []
    tokens.close = lambda *given: (closed.append(given), close(*given))[1]  # type: ignore[method-assign, func-returns-value]
    with compute._calling():
        thread = threading.Thread(target=compute.close)
        thread.start()
        while not compute._closed:
            thread.join(0.001)
    thread.join(30)
    runtime.close()
    assert len(closed) == 1
    assert device.used_bytes == device.pinned_bytes == device.num_events == 0


def test_close_waits_for_a_look_whether_a_step_has_stalled() -> None:
    """The page that is looked at is freed behind it; later looks find nothing."""
    device = FakeDevice()
    runtime = make_runtime(device, 9)
    model = Model(runtime)
    model.compute.begin_token()
    tokens = model.compute._tokens
    assert tokens is not None
    closing = threading.Thread(target=model.compute.close)
    pinned: list[int] = []

    class Notice:
        def __getitem__(self, place: int) -> int:
            before = device.pinned_bytes
            if not pinned:
                closing.start()
                closing.join(0.2)
            pinned.append(device.pinned_bytes - before)
            return tokens.number

    notice, tokens._notice = tokens._notice, Notice()  # type: ignore[assignment]
    assert model.compute.has_stalled
    tokens._notice = notice
    closing.join(30)
    assert pinned == [0]
    # As if the look had begun before `close`.
    tokens._owner, tokens._notice = threading.get_ident(), Notice()  # type: ignore[assignment]
    assert tokens.is_open
    assert not model.compute.has_stalled
    assert pinned == [0]
    tokens._owner, tokens._notice = None, notice
    runtime.close()
    assert device.used_bytes == device.pinned_bytes == device.num_events == 0
