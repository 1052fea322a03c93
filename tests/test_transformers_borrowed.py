"""A model's KV cache takes memory from slots that borrowed it: the same bits, and asked seldom."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moecache.runtime import borrowed as module
from moecache.runtime.borrowed import Borrowed
from tests.helpers.offloading import generated, load_in_slots

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from moecache.integrations.transformers import load, prompts, reading  # noqa: E402
from moecache.integrations.transformers._cache_layers import growth  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
MOST = 6


class Memory:
    """What is free, and how often that was asked."""

    free = 0
    num_asked = 0

    def __call__(self) -> int:
        """Return it."""
        self.num_asked += 1
        return self.free


@pytest.fixture(name="memory")
def _memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(module, "free_host_bytes", memory)
    return memory


@pytest.fixture(name="model", params=["fast", "torch"])
def _model(request: pytest.FixtureRequest, qwen3_moe: Path) -> Iterator[Any]:
    """Return a model with a quarter of its experts in slots, six of which are borrowed."""
    model = load_in_slots(qwen3_moe, compute=request.param)
    runtime = model.moecache.runtime
    runtime.borrowed = Borrowed(runtime.cache, runtime.pool, MOST)
    with model.moecache, torch.no_grad():
        yield model


def ids_of(num: int) -> Any:
    """Return random tokens, [1, num]."""
    return torch.randint(3, 90, (1, num), generator=torch.Generator().manual_seed(num))


def test_tokens_are_the_same_while_slots_go_and_come(model: Any, memory: Memory) -> None:
    """Asked where a prompt begins and where pages do; all are back for the next conversation."""
    ids, cache = ids_of(250), model.moecache.runtime.cache
    memory.free = 1 << 40
    before = generated(model, ids, 12)
    assert cache.num_withheld == 0
    borrowed = model.moecache.runtime.borrowed
    unfilled = model.moecache.runtime.pool.nbytes  # at most
    assert memory.free - unfilled <= borrowed.free_bytes() <= memory.free
    assert borrowed.room_bytes() - borrowed.free_bytes() == borrowed.nbytes > 0
    memory.free = memory.num_asked = 0
    assert torch.equal(generated(model, ids, 12), before)
    assert memory.num_asked == 2
    assert cache.num_withheld == MOST
    assert borrowed.nbytes == 0
    cache.check()
    memory.free = 1 << 40
    generated(model, ids[:, :9], 2)
    assert cache.num_withheld == 0


def test_readers_and_texts_together_ask_as_well(model: Any, memory: Memory) -> None:
    """For a whole prompt before it is read, and for a page of each text that is full."""
    cache = model.moecache.runtime.cache
    reader = reading.PromptReader(model, ids_of(256)[0].tolist(), None)
    reader.begin()
    assert (memory.num_asked, cache.num_withheld) == (1, MOST)
    while reader.advance(8) is None:
        pass
    decoder = model.moecache.decoder
    if decoder is None or not decoder.is_ready():
        return
    memory.num_asked = 0
    for token in (5, 7):
        assert decoder.step_together([token], [reader.cache]) is not None
    assert memory.num_asked == 1


def test_what_is_asked_for_is_what_a_cache_takes(model: Any) -> None:
    """By tokens and bytes: a page more than the new ones, and an eighth."""
    config = model.config
    heads = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    assert prompts.bytes_per_token(model) == heads * model.dtype.itemsize
    if model.moecache.decoder is None:
        return  # the cache is transformers' own, without room for more
    out = model(ids_of(250), use_cache=True)
    for length in range(250, 1200):
        layer = out.past_key_values.layers[0]
        held = getattr(layer, "_keys", layer.keys).shape[2]
        out = model(torch.tensor([[5]]), past_key_values=out.past_key_values, use_cache=True)
        now = getattr(layer, "_keys", layer.keys).shape[2]
        assert now - held <= growth(length, 1) or length == 250


def test_load_borrows_where_it_computes_in_ram(
    qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As keys and values are in the same memory, and the model says what they take."""
    from moecache.integrations.transformers import _loading

    asked: list[dict[str, Any]] = []
    opened = _loading.open
    monkeypatch.setattr(
        _loading, "open", lambda *given, **named: (asked.append(named), opened(*given, **named))[1]
    )
    with load(qwen3_moe).moecache:
        pass
    assert [named["makes_room"] for named in asked] == [True]
