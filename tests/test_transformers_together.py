"""Prompts of several texts go through a model together, and each has the logits it has alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache.errors import StoreError
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.offloading import load_in_slots

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from moecache.decoding.sampler import Sampler, Sampling  # noqa: E402
from moecache.decoding.streams import TokenTimes  # noqa: E402
from moecache.integrations.transformers import (  # noqa: E402
    _current,
    continuing,
    prompts,
    reading,
    together,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
PAGE = 32
# Two whole pages and a few tokens that are decoded; and what goes through a model together.
LENGTHS = (2 * PAGE + 5, 11, 5, 1, PAGE + 20, 9, 3)


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_current, "_reads_prompts", lambda *_: False)
    for module in (prompts, reading, together):
        monkeypatch.setattr(module, "PAGE_TOKENS", PAGE)


@pytest.fixture(name="model", params=["fast", "torch"], scope="module")
def _model(request: pytest.FixtureRequest, qwen3_moe: Path) -> Iterator[Any]:
    model = load_in_slots(qwen3_moe, compute=request.param)
    with model.moecache:
        yield model


def tokens_of(num: int, seed: int = 0) -> list[int]:
    """Return random tokens."""
    return np.random.default_rng(seed).integers(3, 90, num).tolist()


def begin(
    model: Any, prompt: Sequence[int], prefixes: Any = None, num_tokens: int = 3
) -> tuple[Any, list[np.ndarray]]:
    """Return a text, and the logits that its tokens are drawn of."""
    seen: list[np.ndarray] = []

    class Noting(Sampler):
        def draw(self, logits: np.ndarray, mask: np.ndarray | None = None) -> int:
            seen.append(logits.copy())
            return super().draw(logits, mask)

    streamer = TokenTimes()
    sampler = Noting(Sampling(temperature=0.0), prompt)
    text = continuing.Text(
        model, prompt, sampler, streamer, max_new_tokens=num_tokens, prefixes=prefixes
    )
    return text, seen


def finish(model: Any, texts: Sequence[Any]) -> int:
    """Go on with texts until all are over; return how often one was advanced."""
    side_by_side, left = together.Together(model), set(texts)
    for text in texts:
        side_by_side.add(text)
    for number in range(100):
        if not left:
            return number
        left -= set(side_by_side.advance())
    raise AssertionError("texts do not end")


def logits_of(model: Any, some: Sequence[Sequence[int]], prefixes: Any = None) -> list[Any]:
    """Return the logits of texts that go on together."""
    made = [begin(model, prompt, prefixes) for prompt in some]
    finish(model, [text for text, _ in made])
    assert [text.error for text, _ in made] == [None] * len(made)
    return [seen for _, seen in made]


def test_prompts_that_are_read_together_have_the_bits_they_have_alone(model: Any) -> None:
    """Whether pages are kept or not; an expert is read once for all of them."""
    some = [tokens_of(num, seed) for seed, num in enumerate(LENGTHS)]
    alone = [logits_of(model, [prompt])[0] for prompt in some]
    for prefixes in (None, reading.open_prefixes(model, 2**24)):
        found = logits_of(model, some, prefixes)
        for mine, expected in zip(found, alone, strict=True):
            assert np.array_equal(mine, expected)
    num_bytes = []
    for groups in ([[prompt] for prompt in some], [some]):
        before = model.moecache.stats()
        for group in groups:
            finish(model, [begin(model, prompt, num_tokens=1)[0] for prompt in group])
        num_bytes.append((model.moecache.stats() - before).bytes_read)
    assert num_bytes[1] < num_bytes[0] * 2 / 3


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_families_read_prompts_together(tmp_path: Path, name: str, dtype: str) -> None:
    """Windows, latents, and experts of 16 bits, whose products may be torch's."""
    family = FAMILIES[name]
    path = write_checkpoint(family, tmp_path, dtype)
    model = load_in_slots(path, "50%", compute="torch" if name == "gpt_oss" else "fast")
    some = [tokens_of(num, seed) for seed, num in enumerate(LENGTHS)]
    with model.moecache:
        alone = [logits_of(model, [prompt])[0] for prompt in some]
        for mine, expected in zip(logits_of(model, some), alone, strict=True):
            assert np.array_equal(mine, expected)


def test_a_page_s_worth_is_read_together(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has more goes alone: products take longer than reads then."""
    read: list[list[int]] = []
    own = together.read_spans
    monkeypatch.setattr(
        together,
        "read_spans",
        lambda spans, on_layer: (read.append([s.num_tokens for s in spans]), own(spans, on_layer)),
    )
    some = [tokens_of(num, num) for num in (12, 70, 10, 11, 9, 33)]
    alone = [logits_of(model, [prompt])[0] for prompt in some]
    assert read == []
    for mine, expected in zip(logits_of(model, some), alone, strict=True):
        assert np.array_equal(mine, expected)
    assert read == [[12, 10, 9]]


def test_an_expert_that_cannot_be_read_ends_one_prompt_alone(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has failed together is read anew, one by one."""
    some = [tokens_of(num, seed) for seed, num in enumerate((8, 12, 6))]
    alone = [logits_of(model, [prompt])[0] for prompt in some]
    prefixes = reading.open_prefixes(model, 2**24)
    made = [begin(model, prompt, prefixes) for prompt in some]
    own, failing, calls = together.Together._read, made[1][0], []

    def fail(spans: Any, on_layer: Any) -> None:
        calls.append(len(spans))

        def stop_within() -> None:
            on_layer()
            raise StoreError("an expert is gone")

        own_read(spans, stop_within)

    def read_alone(self: Any, text: Any, num_pages: int) -> None:
        if text is failing:
            raise StoreError("an expert is gone")
        own(self, text, num_pages)

    own_read = together.read_spans
    monkeypatch.setattr(together, "read_spans", fail)
    monkeypatch.setattr(together.Together, "_read", read_alone)
    finish(model, [text for text, _ in made])
    assert calls == [3]
    assert isinstance(failing.error, StoreError)
    for number in (0, 2):
        assert made[number][0].error is None
        assert np.array_equal(made[number][1], alone[number])


def test_prompts_that_nobody_wants_any_more_end_within_a_layer(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several goes to the end of the span, and gets no token."""
    some = [tokens_of(num, seed) for seed, num in enumerate((8, 12, 6))]
    alone = logits_of(model, [some[2]])[0]
    own = together.read_spans
    for num_stopped in (2, 3):
        made = [begin(model, prompt) for prompt in some]
        layers: list[int] = []

        def read(spans: Any, on_layer: Any, made: Any = made, layers: Any = layers) -> None:
            def stop() -> None:
                layers.append(1)
                for text, _ in made[:num_stopped]:  # noqa: B023
                    text.streamer.stopped = True
                on_layer()

            own(spans, stop)

        monkeypatch.setattr(together, "read_spans", read)
        finish(model, [text for text, _ in made])
        assert [text.error for text, _ in made] == [None] * 3
        assert [len(text.streamer.tokens) for text, _ in made[:2]] == [0, 0]
        assert len(layers) == (2 if num_stopped == 2 else 1)
        assert made[0][0].streamer.read_tokens > 0
        if num_stopped == 2:
            assert np.array_equal(made[2][1], alone)


def test_a_prompt_that_begins_like_another_waits_for_its_pages(model: Any) -> None:
    """All come at once, behind a short one; what they share is read once."""
    shared = tokens_of(4 * PAGE)
    some = [shared + tokens_of(num, num) for num in (40, 18, 3)]
    some.append(tokens_of(7))
    alone = [logits_of(model, [prompt])[0] for prompt in some]
    prefixes = reading.open_prefixes(model, 2**24)
    made = [begin(model, prompt, prefixes) for prompt in some]
    finish(model, [text for text, _ in (made[3], *made[:3])])
    for (text, seen), expected in zip(made, alone, strict=True):
        assert text.error is None
        assert np.array_equal(seen, expected)
    known = [text.streamer.cached_tokens for text, _ in made]
    assert known[0] == 0
    assert min(known[1:3]) >= 4 * PAGE


def test_nobody_waits_for_pages_that_are_not_kept(model: Any) -> None:
    """There is no room for a page: all are read in turns."""
    shared = tokens_of(4 * PAGE)
    prefixes = reading.open_prefixes(model, 1)
    made = [begin(model, shared + tokens_of(num, num), prefixes)[0] for num in (40, 18)]
    made[0].begin()
    assert not made[1].will_find(made[0])
    finish(model, made)
    assert [text.streamer.cached_tokens for text in made] == [0, 0]


def test_pages_that_cannot_be_restored_are_looked_for_again(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of them is left in the cache."""
    prompt = tokens_of(3 * PAGE)
    expected = logits_of(model, [prompt])[0]
    prefixes = reading.open_prefixes(model, 2**24)
    logits_of(model, [prompt], prefixes)
    text, seen = begin(model, prompt, prefixes)
    own = reading._restore

    def fail(cache: Any, pages: Any) -> None:
        own(cache, [page[:1] for page in pages])
        raise MemoryError("no memory for pages")

    with monkeypatch.context() as patched:
        patched.setattr(reading, "_restore", fail)
        with pytest.raises(MemoryError, match="no memory for pages"):
            text.begin()
    assert text.cache.get_seq_length() == 0
    finish(model, [text])
    assert text.streamer.cached_tokens == 2 * PAGE
    assert np.array_equal(seen, expected)
