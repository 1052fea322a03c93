"""Conversations with caches of their own decode in one call: each has the bits it has alone."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moecache.errors import ConfigError, StoreError
from tests.helpers import quantized
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.kernels import computing
from tests.helpers.offloading import load_in_slots
from tests.test_transformers_recipes import VARIANTS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
LENGTHS = (3, 19, 8, 1)


def prompts(lengths: Sequence[int] = LENGTHS) -> list[Any]:
    """Return prompts of these lengths, [1, length] each."""
    return [torch.arange(2, 2 + n)[None] * (row + 2) % 90 for row, n in enumerate(lengths)]


def read(model: Any, ids: Any) -> Any:
    """Return the cache of a prompt that was read."""
    return model(input_ids=ids, use_cache=True).past_key_values


def token(row: int, step: int) -> int:
    """Return the token that a sequence goes on with."""
    return 5 + 7 * row + 3 * step


def assert_alone(model: Any, num: int = 6) -> None:
    """Compare sequences that join and leave with each of them alone."""
    with torch.no_grad():
        caches = [read(model, ids) for ids in prompts()]
        expected = []
        for row, cache in enumerate(caches):
            own = copy.deepcopy(cache)
            expected.append(
                [
                    model(input_ids=torch.tensor([[token(row, step)]]), past_key_values=own).logits[
                        0, -1
                    ]
                    for step in range(num)
                ]
            )
        steps = [0] * len(caches)
        # One begins later than the others, and another ends before them.
        for rows in ((0, 1, 2), (0, 1, 2), (3, 1, 0, 2), (0, 3, 2), (2, 3), (3,), (0, 3)):
            found = model.moecache.decoder.step_together(
                [token(row, steps[row]) for row in rows], [caches[row] for row in rows]
            )
            assert found is not None, model.moecache.decoder.reason
            for row, logits in zip(rows, found, strict=True):
                assert torch.equal(torch.from_numpy(logits), expected[row][steps[row]]), row
                steps[row] += 1
                assert caches[row].get_seq_length() == LENGTHS[row] + steps[row]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "window", "long rope"])
def test_a_sequence_has_the_bits_that_it_has_alone(tmp_path: Path, name: str) -> None:
    """At all slots and few, one thread and two: heads, latents, a window, angles by length."""
    kind, changes = VARIANTS.get(name, (name, {}))
    family = replace(FAMILIES[kind], settings={**FAMILIES[kind].settings, **changes})
    path = write_checkpoint(family, tmp_path, "float32")
    for memory, threads in (("100%", 2), ("25%", 1)):
        with computing(threads=threads):
            model = load_in_slots(path, memory, compute="fast")
            with model.moecache:
                assert_alone(model)


def test_sinks_and_windows_decode_together(tmp_path: Path) -> None:
    """gpt-oss, whose layers' caches differ."""
    published, _ = quantized.write_quantized(quantized.GPT_OSS, quantized.mxfp4(), tmp_path)
    model = load_in_slots(published, "50%", dtype=torch.bfloat16)
    with model.moecache:
        assert_alone(model)


@pytest.fixture(name="model", scope="module")
def _model(qwen3_moe: Path) -> Any:
    model = load_in_slots(qwen3_moe, compute="fast")
    with model.moecache, torch.no_grad():
        yield model


def test_a_failing_read_leaves_every_cache_as_it_was(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same call gives the same bits as if nothing had happened."""
    caches = [read(model, ids) for ids in prompts()]
    tokens = [token(row, 0) for row in range(4)]
    step = model.moecache.decoder.step_together
    expected = step(tokens, copy.deepcopy(caches))
    runtime = model.moecache.runtime
    waves, num_calls = type(runtime).waves, 0

    def failing(self: Any, layer: int, ids: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if layer == 1:
            raise StoreError("the disk failed")
        return waves(self, layer, ids, **named)

    monkeypatch.setattr(type(runtime), "waves", failing)
    with pytest.raises(StoreError):
        step(tokens, caches)
    assert num_calls > 1
    assert [cache.get_seq_length() for cache in caches] == list(LENGTHS)
    monkeypatch.undo()
    assert (step(tokens, caches) == expected).all()
    assert [cache.get_seq_length() for cache in caches] == [n + 1 for n in LENGTHS]


@pytest.mark.parametrize("memory", ["25%", "100%"])
def test_a_policy_is_told_whose_row_is_whose(qwen3_moe: Path, tmp_path: Path, memory: str) -> None:
    """By a name that a sequence keeps, whichever others there are, resident or not."""
    model = load_in_slots(qwen3_moe, memory, compute="fast")
    with model.moecache, torch.no_grad():
        caches = [read(model, ids) for ids in prompts()]
        step = model.moecache.decoder.step_together
        with model.moecache.runtime.record_trace(tmp_path / "trace.npz") as recording:
            for rows in ((0, 1, 2), (2, 0), (1,), (3, 2), (2,)):
                step([token(row, 0) for row in rows], [caches[row] for row in rows])
        assert recording.trace.sequence.tolist() == [0, 1, 2, 2, 0, 1, 3, 2, 2]


def test_a_sequence_that_decodes_alone_is_no_bulk_step(qwen3_moe: Path, tmp_path: Path) -> None:
    """With fewer slots than experts, where the step hits and where it misses."""
    model = load_in_slots(qwen3_moe, "75%", compute="fast")
    with model.moecache as offload, torch.no_grad():
        cache = read(model, prompts()[0])
        before = offload.stats()
        with offload.runtime.record_trace(tmp_path / "trace.npz") as recording:
            for number in range(6):
                offload.decoder.step_together([token(0, number % 2)], [cache])
        made = offload.stats() - before
    assert 0 < made.num_resident_steps < made.num_steps
    assert len(recording.trace.bulk) == 6
    assert not recording.trace.bulk.any()


def test_resident_steps_of_several_rows_are_counted_as_those_of_the_modules(
    qwen3_moe: Path, tmp_path: Path
) -> None:
    """Steps, hits, products, and whose row is whose."""
    found = []
    for is_own in (False, True):
        model = load_in_slots(qwen3_moe, "100%", compute="fast", prefetch="off")
        with model.moecache as offload, torch.no_grad():
            runtime, generator = offload.runtime, torch.Generator().manual_seed(3)
            while runtime.cache.num_resident < runtime.layout.total_experts:
                read(model, torch.randint(1, 90, (1, 40), generator=generator))
            cache = read(model, torch.cat(prompts((8, 8, 8))))
            if is_own:
                del model.__dict__["forward"]
            before, products = offload.stats(), offload.num_products
            with runtime.record_trace(tmp_path / f"{is_own}.npz") as recording:
                for step in range(5):
                    new = torch.tensor([[token(row, step)] for row in range(3)])
                    model(input_ids=new, past_key_values=cache)
            spent, trace = offload.stats() - before, recording.trace
            found.append(
                (
                    *(spent.num_hits, spent.num_misses, spent.num_steps, spent.num_resident_steps),
                    offload.num_products - products,
                    *(trace.sequence.tolist(), trace.bulk.tolist(), trace.experts.tolist()),
                )
            )
    assert found[0] == found[1]
    assert found[0][5] == [0, 1, 2] * 5


def test_what_is_no_sequence_of_its_own_is_left_to_the_modules(model: Any) -> None:
    """Batches, other caches, empty ones and other dtypes give `None`; nonsense is an error."""
    import transformers

    step = model.moecache.decoder.step_together
    own, other = (read(model, ids) for ids in prompts()[:2])
    pair = copy.deepcopy(own)
    pair.batch_repeat_interleave(2)
    assert step([3, 4], [other, pair]) is None
    assert step([3], [transformers.DynamicCache(config=model.config)]) is None
    static = transformers.StaticCache(config=model.config, max_cache_len=16)
    model(input_ids=prompts()[0], past_key_values=static)
    assert step([3, 4], [own, static]) is None
    half = copy.deepcopy(own)
    for layer in half.layers:
        layer.keys, layer.values = layer.keys.bfloat16(), layer.values.bfloat16()
    assert step([3, 4], [other, half]) is None
    with pytest.raises(ConfigError, match="two sequences have one cache"):
        step([3, 4], [own, own])
    with pytest.raises(ConfigError, match="17 tokens"):
        step([3] * 17, [copy.deepcopy(own) for _ in range(17)])
    with pytest.raises(ConfigError, match="positions"):
        step([3, 4], [own, other], [4])
    assert [own.get_seq_length(), other.get_seq_length()] == list(LENGTHS[:2])


def test_more_sequences_than_a_call_has_rows_take_turns(model: Any) -> None:
    """Each finds its memory again, and what has gone is kept by nobody."""
    import weakref

    own = read(model, prompts()[0])
    alone = copy.deepcopy(own)
    caches = [copy.deepcopy(own) for _ in range(40)]
    step = model.moecache.decoder.step_together
    for i in range(2):
        expected = step([token(0, i)], [alone])
        for begin in (0, 16, 32):
            found = step(
                [token(0, i)] * len(caches[begin : begin + 16]), caches[begin : begin + 16]
            )
            assert (found == expected).all()
    gone = [weakref.ref(layer) for cache in caches for layer in cache.layers]
    del caches
    assert not any(reference() for reference in gone)


def test_positions_may_be_others_than_places(model: Any) -> None:
    """Of a text behind pictures, say."""
    caches = [read(model, ids) for ids in prompts()[:2]]
    others = copy.deepcopy(caches)
    found = model.moecache.decoder.step_together([3, 4], caches, [40, 23])
    for row, place in enumerate((40, 23)):
        expected = model(
            input_ids=torch.tensor([[3 + row]]),
            past_key_values=others[row],
            position_ids=torch.tensor([[place]]),
        ).logits[0, -1]
        assert torch.equal(torch.from_numpy(found[row]), expected)
