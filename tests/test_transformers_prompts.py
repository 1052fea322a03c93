"""Prompts in pages: the same bits whatever is cached, in a span or one after the other."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache import kernels
from moecache.errors import ConfigError, StoreError
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.gguf_members import MODELS
from tests.helpers.gguf_models import write_gguf
from tests.helpers.offloading import load_in_slots, load_whole

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from moecache.decoding.sampler import Sampling  # noqa: E402
from moecache.decoding.streams import TokenTimes  # noqa: E402
from moecache.integrations.transformers import (  # noqa: E402
    _current,
    continuing,
    generation,
    load,
    prompts,
    reading,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
PAGE = 32


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have modules read prompts, in pages of 32 positions, so that short ones have many."""
    monkeypatch.setattr(_current, "_reads_prompts", lambda *_: False)
    for module in (prompts, reading):
        monkeypatch.setattr(module, "PAGE_TOKENS", PAGE)


@pytest.fixture(name="model", params=["fast", "torch"])
def _model(request: pytest.FixtureRequest, qwen3_moe: Path) -> Iterator[Any]:
    """Return a model with a quarter of its experts in slots."""
    model = load_in_slots(qwen3_moe, compute=request.param)
    with model.moecache, torch.no_grad():
        yield model


def tokens_of(num: int) -> list[int]:
    """Return random tokens, the same of each number."""
    drawn = torch.randint(3, 90, (num,), generator=torch.Generator().manual_seed(num))
    return [int(token) for token in drawn]


def read(model: Any, tokens: list[int], prefixes: Any = None, num_pages: int = 8) -> Any:
    """Return the logits after a prompt, and after one more token."""
    reader = reading.PromptReader(model, tokens, prefixes)
    logits = None
    while logits is None:
        logits = reader.advance(num_pages)
    assert reader.num_left == 0
    more = model(
        input_ids=torch.tensor([[5]]), past_key_values=reader.cache, use_cache=True
    ).logits[0, -1]
    return torch.stack([logits.float(), more.float()])


def known_of(model: Any, tokens: list[int], prefixes: Any) -> int:
    """Return how many tokens of a prompt are known."""
    reader = reading.PromptReader(model, tokens, prefixes)
    reader.begin()
    return reader.num_cached


def test_the_room_of_pages_may_be_text(model: Any, tmp_path: Path) -> None:
    """What is no size is refused before any text is read."""
    prefixes = reading.open_prefixes(
        model, "16MiB", directory=str(tmp_path / "pages"), max_disk_bytes="16MiB"
    )
    for _ in range(2):
        read(model, tokens_of(70), prefixes)
    assert prefixes.stats().hit_tokens > 0
    prefixes.close()
    with pytest.raises(ConfigError, match="'lots' is not a size"):
        reading.open_prefixes(model, "lots")


@pytest.mark.parametrize("num", [1, 16, 31, 32, 33, 48, 64, 97, 100, 129])
def test_a_prompt_has_the_bits_that_it_has_without_a_cache(model: Any, num: int) -> None:
    """With pages one by one, together, found all or in part, and after another prompt."""
    tokens = tokens_of(num)
    expected = read(model, tokens)
    prefixes = reading.open_prefixes(model, 2**24)
    found = [read(model, tokens, num_pages=1), read(model, tokens, num_pages=3)]
    found += [read(model, tokens, prefixes) for _ in range(2)]
    if num > PAGE:
        assert known_of(model, tokens, prefixes) == (num - 1) // PAGE * PAGE
        other = tokens[: PAGE + 1] + tokens_of(20)
        assert torch.equal(read(model, other, prefixes), read(model, other))
    assert all(torch.equal(one, expected) for one in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_goes_on_within_a_page_with_the_bits_that_it_has(
    tmp_path: Path, dtype: str
) -> None:
    """Where all products are kernels': from where two prompts differ, in steps of 16 tokens."""
    pytest.importorskip("gguf")
    widths = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32}
    tiny = replace(MODELS["qwen3moe"], settings={**MODELS["qwen3moe"].settings, **widths})
    types = {"exps.weight": "BF16", "attn_": "Q8_0", "token_embd": "Q8_0", "output.": "Q4_0"}
    original = tiny.build()
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny.metadata(original.config), tiny.tensors(original), types)
    model = load(path, "50%", dtype=getattr(torch, dtype), compute="fast", trunk="native")
    with model.moecache, torch.no_grad():
        if not prompts.are_rows_apart(model):
            assert kernels.level() == "generic"
            pytest.skip("plain C has no attention of its own")
        shared = tokens_of(130)
        for num, length in ((40, 57), (40, 40), (60, 130), (130, 130), (17, 130), (99, 101)):
            prefixes = reading.open_prefixes(model, 2**24)
            assert prefixes is not None
            read(model, [*shared[:num], *tokens_of(5)], prefixes)
            tokens = shared[:length]
            expected, known = read(model, tokens), []
            for _ in range(2):
                known.append(known_of(model, tokens, prefixes))
                assert torch.equal(read(model, tokens, prefixes), expected)
            same = min(num, length - 1)
            whole = same // PAGE * PAGE
            # Of a page that is not whole two tokens are left, and few tokens of one are decoded.
            part = max(0, min(same, length - 2) - whole) // 16 * 16
            assert known[0] in (whole, whole + part), (num, length)
            assert known[0] == whole + part or num + 5 - whole <= 16
            assert known[1] >= known[0]


def test_rows_are_not_apart_where_torch_multiplies(tmp_path: Path) -> None:
    """A trunk of numbers in float32, shared experts, a sigmoid; and so pages are kept whole."""
    for name, family in (("own", "qwen3_moe"), ("shared", "qwen2_moe"), ("sigmoid", "glm4_moe")):
        path = write_checkpoint(FAMILIES[family], tmp_path / name, "float32")
        model = load_in_slots(path, compute="fast")
        with model.moecache, torch.no_grad():
            assert model.moecache.decoder.is_ready()
            assert not prompts.are_rows_apart(model)
            prefixes = reading.open_prefixes(model, 2**24)
            assert prefixes is not None
            tokens = tokens_of(PAGE + 20)
            read(model, tokens, prefixes)
            assert prefixes.stats().num_pages == 1
            assert known_of(model, [*tokens, 5], prefixes) == PAGE


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "gemma4_text", "llama4"])
def test_windows_and_latents_are_kept_too(tmp_path: Path, name: str) -> None:
    """And the pages of a prompt give what the whole prompt gives, but for rounding."""
    path = write_checkpoint(FAMILIES[name], tmp_path, "float32")
    tokens = tokens_of(110)
    with torch.no_grad():
        whole = load_whole(FAMILIES[name], path)(torch.tensor([tokens])).logits[0, -1]
        model = load_in_slots(path, compute="torch")
        with model.moecache:
            expected = read(model, tokens)
            prefixes = reading.open_prefixes(model, 2**24)
            for _ in range(2):
                assert torch.equal(read(model, tokens, prefixes), expected)
            assert prefixes is not None
            assert prefixes.stats().hit_tokens == 96
    assert (expected[0] - whole).norm() / whole.norm() < 2e-6


def test_experts_are_read_once_for_a_span(qwen3_moe: Path) -> None:
    """The bytes of a prompt of four pages are those of one page that uses the same experts."""
    model = load_in_slots(qwen3_moe, compute="fast")
    with model.moecache, torch.no_grad():
        before = model.moecache.stats()
        read(model, tokens_of(4 * PAGE))
        spent = model.moecache.stats() - before
        layout = model.moecache.runtime.layout
        assert spent.num_misses <= 2 * layout.total_experts
        # Page by page most of them come again.
        before = model.moecache.stats()
        read(model, tokens_of(4 * PAGE), num_pages=1)
        assert (model.moecache.stats() - before).bytes_read > spent.bytes_read


def test_a_forward_and_generate_cut_prompts_likewise(qwen3_moe: Path) -> None:
    """With `compute="fast"`: logits of all positions, with and without a cache of the caller's."""
    model = load_in_slots(qwen3_moe, compute="fast")
    tokens = tokens_of(75)
    with model.moecache, torch.no_grad():
        expected = read(model, tokens)
        # The head's product of one row has other bits than that of many.
        assert model(input_ids=torch.tensor([tokens])).logits.shape[1] == 75
        out = model(input_ids=torch.tensor([tokens]), use_cache=True, logits_to_keep=1)
        assert torch.equal(out.logits[0, -1].float(), expected[0])
        more = model(torch.tensor([[5]]), past_key_values=out.past_key_values).logits[0, -1]
        assert torch.equal(more.float(), expected[1])
        times = TokenTimes()
        generation.continue_tokens(
            model, torch.tensor([tokens]), times, max_new_tokens=6, temperature=0
        )
        ids = torch.tensor([tokens])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)
        assert made[0, 75:].tolist() == times.tokens


def test_a_failing_read_leaves_nothing_of_a_span(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error reaches the caller, and the next prompt has the bits that it has."""
    tokens = tokens_of(100)
    expected = read(model, tokens)
    store = model.moecache.runtime.store
    calls = 0

    def fail(layer: int, expert: int) -> Any:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise StoreError("the disk is gone")
        return own(layer, expert)

    own = store.runs
    with monkeypatch.context() as patched:
        patched.setattr(store, "runs", fail)
        with pytest.raises(StoreError, match="the disk is gone"):
            for start in range(40):
                read(model, tokens[start:] + tokens_of(30 + start))
    assert torch.equal(read(model, tokens), expected)


def test_a_stopped_prompt_ends_between_layers(model: Any) -> None:
    """And the model goes on as before."""
    tokens = torch.tensor([tokens_of(120)])
    times = TokenTimes()
    seen: list[int] = []

    def stop(num_tokens: int) -> None:
        seen.append(num_tokens)
        times.stopped = len(seen) == 1
        times.check()

    times.read = stop  # type: ignore[method-assign]
    generation.continue_tokens(model, tokens, times, max_new_tokens=3)
    assert times.tokens == []
    assert len(seen) == 1
    times = TokenTimes()
    generation.continue_tokens(model, tokens, times, max_new_tokens=3)
    assert len(times.tokens) == 3
    assert times.progress() == (0, 120, 120)


def test_what_a_model_says_of_sampling_is_heeded(model: Any) -> None:
    """Its file's numbers, the caller's before them, and greedy where the file says nothing."""
    config = model.generation_config
    config.do_sample = False
    assert generation.sampling_of(model, 3) == Sampling(temperature=0, top_k=50, seed=3)
    config.do_sample, config.temperature, config.top_p = True, 0.7, 0.9
    found = generation.sampling_of(model, 3, top_k=7, temperature=None)
    assert found == Sampling(temperature=0.7, top_k=7, top_p=0.9, seed=3)


def test_a_model_that_has_no_loop_here_is_drawn_from_alike(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`generate` with the sampler gives the tokens of the loop, drawn or not, and obeys a mask."""
    ids = torch.tensor([tokens_of(20)])

    class Odd:
        def allowed(self) -> Any:
            return np.arange(128) % 2 == 1

        def take(self, token: int) -> None:
            assert token % 2 == 1

    for temperature, mask in ((0.0, None), (1.5, None), (1.5, Odd())):
        found = []
        for has_loop in (continuing.has_loop, lambda _: False):
            with monkeypatch.context() as patched:
                patched.setattr(continuing, "has_loop", has_loop)
                times = TokenTimes()
                generation.continue_tokens(
                    model,
                    ids,
                    times,
                    max_new_tokens=9,
                    temperature=temperature,
                    seed=4,
                    mask=mask,
                )
                found.append(times.tokens)
        assert found[0] == found[1], temperature
        assert len(found[0]) == 9


def test_a_span_takes_no_more_memory_than_its_bound(model: Any) -> None:
    """Wide models read fewer pages together, and one at least."""
    config = model.config.get_text_config()
    assert prompts.span_pages(model) == prompts.SPAN_PAGES
    width = config.hidden_size
    try:
        config.hidden_size = 2**20
        few = prompts.span_pages(model)
        config.hidden_size = 2**40
        assert prompts.span_pages(model) == 1
    finally:
        config.hidden_size = width
    assert 1 <= few < prompts.SPAN_PAGES


def test_a_span_takes_no_more_memory_than_is_free(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the slots that are still to be filled."""
    offload = model.moecache
    width = model.config.get_text_config().hidden_size
    page = prompts.PAGE_TOKENS * offload.runtime.layout.top_k * width * 4
    pool, cache = offload.runtime.pool, offload.runtime.cache
    unfilled = pool.nbytes * (cache.capacity - cache.num_resident) // pool.num_slots
    free = unfilled + prompts._FREE_PART * 5 * page
    monkeypatch.setattr("moecache.runtime.borrowed.free_host_bytes", lambda: free)
    assert prompts.span_pages(model) == 5
    monkeypatch.setattr("moecache.runtime.borrowed.free_host_bytes", lambda: 0)
    assert prompts.span_pages(model) == 1
