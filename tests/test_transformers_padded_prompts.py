"""Prompts of a batch that is padded on the left: without padding, with the bits of each alone."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache.errors import StoreError
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.more_families import MORE_FAMILIES
from tests.helpers.offloading import load_in_slots, without_least_steps

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from moecache.decoding._held import KeyValues, States  # noqa: E402
from moecache.integrations.transformers import _decoding, _layer_experts, prompts  # noqa: E402
from moecache.integrations.transformers._padding import Ragged  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

# A window, latents, states and convolutions, and queries that positions scale.
NAMES = (
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_5_moe",
    "nemotron_h",
    "lfm2_moe",
    "mistral4",
    "kimi_linear",
)
SCALED = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 8,
}
# In parts of 8 tokens of each text: some begin in later parts, one with the last token.
LENGTHS = (5, 40, 1, 23)
PART = 32


@pytest.fixture(name="model", params=NAMES)
def _model(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Return a model whose prompts go by the program, in short parts."""
    monkeypatch.setattr(_decoding, "PROMPT_TOKENS", PART)
    # What memory has before it is written to: not a number.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    family = {**MORE_FAMILIES, **FAMILIES}[request.param]
    if request.param == "mistral4":
        family = replace(family, settings={**family.settings, "rope_parameters": SCALED})
    model = load_in_slots(write_checkpoint(family, tmp_path, "float32"), compute="fast")
    with model.moecache, torch.no_grad():
        assert model.moecache.decoder.reads_prompts(), model.moecache.decoder.reason
        yield without_least_steps(model)
    torch.use_deterministic_algorithms(False)


def texts(lengths: tuple[int, ...] = LENGTHS) -> list[Any]:
    """Return random texts, int64 [1, length] each."""
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(3, 90, (1, length), generator=drawn) for length in lengths]


def padded(several: list[Any]) -> dict[str, Any]:
    """Return a batch's arguments, as tokenizers and `generate` make them."""
    width = max(text.shape[1] for text in several)
    rows = [torch.nn.functional.pad(text[0], (width - text.shape[1], 0)) for text in several]
    ids = torch.stack(rows)
    mask = (torch.arange(width) >= width - torch.tensor([[t.shape[1]] for t in several])).long()
    places = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": places}


def goes_by_modules(model: Any, monkeypatch: pytest.MonkeyPatch, **given: Any) -> bool:
    """Return whether a call is computed by the model's own forward."""
    seen: list[Any] = []
    with monkeypatch.context() as patched:
        own = type(model.model).forward
        patched.setattr(
            type(model.model), "forward", lambda *a, **k: seen.append(1) or own(*a, **k)
        )
        model(**given)
    return bool(seen)


def test_texts_have_the_bits_that_they_have_alone(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After their prompts, and after tokens behind them; nothing that is not a number is left."""
    several = texts()
    given = padded(several) | {"logits_to_keep": 1}
    assert not goes_by_modules(model, monkeypatch, **given)
    out, caches, found = model(**given), [prompts.new_cache(model) for _ in several], []
    for text, cache in zip(several, caches, strict=True):
        found.append(model(text, past_key_values=cache, logits_to_keep=1).logits)
    assert torch.equal(out.logits, torch.cat(found))
    for layer in out.past_key_values.layers:
        tensors = [getattr(layer, name, None) for name in ("keys", "values")]
        assert not any(one.isnan().any() for one in tensors if one is not None)
    mask, place = given["attention_mask"], given["position_ids"][:, -1:]
    for step in range(3):
        token = torch.arange(len(several))[:, None] + 7 * step
        mask = torch.cat([mask, torch.ones_like(token)], 1)
        out = model(
            token,
            past_key_values=out.past_key_values,
            attention_mask=mask,
            position_ids=place + step + 1,
        )
        found = [
            model(token[row : row + 1], past_key_values=cache).logits
            for row, cache in enumerate(caches)
        ]
        assert torch.equal(out.logits, torch.cat(found))


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_5_moe"], indirect=True)
@pytest.mark.parametrize(("batch", "longest", "width"), [(1, 20, 100), (40, 5, 16), (8, 9, 80)])
def test_texts_may_all_be_shorter_than_their_batch_is_wide(
    model: Any, batch: int, longest: int, width: int
) -> None:
    """Padded to a multiple, or to the most that a tokenizer gives: whole parts are padding."""
    several = texts((longest, *(1 + row % longest for row in range(batch - 1))))
    given = padded([*several, torch.ones((1, width), dtype=torch.int64)])
    given = {name: array[:-1] for name, array in given.items()} | {"logits_to_keep": 1}
    given["attention_mask"] = given["attention_mask"].bfloat16()
    out = model(**given)
    found = [model(text, logits_to_keep=1).logits for text in several]
    assert torch.equal(out.logits, torch.cat(found))
    assert out.past_key_values.get_seq_length() == width


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_5_moe"], indirect=True)
def test_generate_writes_of_a_batch_what_it_writes_of_each_text(model: Any) -> None:
    """By transformers' own loop."""
    several = texts((3, 17, 30))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    model.generation_config.pad_token_id = 0
    given = padded(several)
    together = model.generate(given["input_ids"], attention_mask=given["attention_mask"], **options)
    for row, text in enumerate(several):
        alone = model.generate(text, attention_mask=torch.ones_like(text), **options)
        assert torch.equal(together[row, 30:], alone[0, text.shape[1] :])


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_5_moe"], indirect=True)
def test_a_batch_that_fails_can_be_asked_for_again(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a part behind which a text has yet to begin."""
    given = padded(texts()) | {"logits_to_keep": 1}
    expected, cache = model(**given).logits, prompts.new_cache(model)
    rows, calls = _layer_experts.fast_rows, []

    def failing(runtime: Any, layer: int, *args: Any, **named: Any) -> Any:
        calls.append(layer)
        if calls.count(layer) == 3:
            raise StoreError("the disk failed")
        return rows(runtime, layer, *args, **named)

    with monkeypatch.context() as patched:
        patched.setattr(_layer_experts, "fast_rows", failing)
        with pytest.raises(StoreError, match="the disk failed"):
            model(**given, past_key_values=cache)
    assert cache.get_seq_length() == 0
    assert torch.equal(model(**given, past_key_values=cache).logits, expected)


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_what_is_asked_of_padding_goes_by_modules(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits, and texts that are padded elsewhere, or are nothing but padding."""
    given = padded(texts((3, 6)))
    assert goes_by_modules(model, monkeypatch, **given)
    assert goes_by_modules(model, monkeypatch, **given, logits_to_keep=4)
    assert not goes_by_modules(model, monkeypatch, **given, logits_to_keep=3)
    for mask in ([[1, 1, 1, 0, 0, 0], [1] * 6], [[0] * 6, [1] * 6], [[0, 1, 0, 1, 1, 1], [1] * 6]):
        other = given | {"attention_mask": torch.tensor(mask), "logits_to_keep": 1}
        assert goes_by_modules(model, monkeypatch, **other)


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_a_policy_is_told_whose_a_row_is(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts of several lengths, by the numbers that their next tokens have, too."""
    runtime, seen = model.moecache.runtime, []
    waves = runtime.waves

    def watched(layer: int, ids: Any, *, sequences: Any) -> Any:
        seen.append(sequences)
        return waves(layer, ids, sequences=sequences)

    monkeypatch.setattr(runtime, "waves", watched)
    model(**padded(texts((3, 6))), logits_to_keep=1)
    assert seen
    for told in seen:
        np.testing.assert_array_equal(told, np.repeat(runtime.steps.names_of(2), [3, 6]))


def test_parts_of_a_batch_are_its_sequences() -> None:
    """In the same memory; there is no sequence behind the last."""
    keys, values = np.zeros((3, 2, 4, 8), np.float32), np.zeros((3, 2, 4, 6), np.float32)
    page = KeyValues(keys.ctypes.data, values.ctypes.data, "f32", keys.shape, 6, (keys, values))
    states = States(64, 64, 0, "bf16", (3, 2, 5), (2, 2, 2), 64, 64, 0, (2, 3, 4), None)
    assert page.of_sequence(2).owner is page.owner
    for one in (page, states):
        for number in (-1, 3):
            with pytest.raises(IndexError, match=f"sequence {number} is none of 3"):
                one.of_sequence(number)


def test_rows_of_texts_that_have_begun() -> None:
    """By position, of texts that begin before, within and behind a call."""
    assert Ragged.find(None, 0, 4) is None
    assert Ragged.find(np.array([0, 3]), 3, 4) is None
    ragged = Ragged.find(np.array([0, 5, 7]), 3, 4)
    assert ragged is not None
    assert ragged.texts == [0, 1]
    assert (ragged.lengths.tolist(), ragged.counts.tolist()) == ([3, 5], [4, 2])
    assert ragged.rows.tolist() == [0, 1, 2, 3, 6, 7]
    assert ragged.names(None) is None
