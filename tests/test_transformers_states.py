"""Caches of transformers whose layers have states: a step writes them as its modules do."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from moecache.errors import StoreError
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.more_families import MORE_FAMILIES
from tests.helpers.offloading import generated, load_in_slots, prompt, without_least_steps

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

TOKEN = torch.tensor([[3]])


@pytest.fixture(
    name="model", params=["qwen3_5_moe", "qwen3_next", "nemotron_h", "lfm2_moe", "kimi_linear"]
)
def _model(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Any]:
    """Return a model that decodes by a program, a quarter of its experts in slots."""
    family = {**MORE_FAMILIES, **FAMILIES}[request.param]
    path = write_checkpoint(family, tmp_path, "float32")
    model = load_in_slots(path, compute="fast")
    with model.moecache, torch.no_grad():
        yield without_least_steps(model)


def read(model: Any, ids: Any = None, **named: Any) -> Any:
    """Return the cache behind a prompt."""
    return model(input_ids=prompt() if ids is None else ids, use_cache=True, **named)


def num_steps(model: Any) -> int:
    """Return how many forwards a program computed."""
    found: int = model.moecache.decoder.num_steps
    return found


def test_beams_reorder_what_a_program_wrote(model: Any) -> None:
    """They give what they give without a program."""
    ids = torch.tensor([[5, 17, 99, 3, 5, 17, 99]])
    found = generated(model, ids, num_tokens=20, num_beams=3).tolist()
    assert num_steps(model) > 0
    del model.__dict__["forward"]
    assert found == generated(model, ids, num_tokens=20, num_beams=3).tolist()


def test_steps_and_modules_go_on_from_each_other(model: Any) -> None:
    """From a prompt by steps, more by the modules, and again by steps."""
    more = torch.arange(20, 40)[None]  # more than a step takes
    found = []
    for is_own in (False, True):
        if is_own:
            del model.__dict__["forward"]
        cache = read(model).past_key_values
        parts = (TOKEN, torch.tensor([[4, 5]]), more, TOKEN, torch.tensor([[6]]))
        outs = [model(input_ids=ids, past_key_values=cache).logits[:, -1] for ids in parts]
        found.append(torch.cat(outs))
    assert num_steps(model) == 4
    assert (found[0] - found[1]).norm() < 3e-6 * found[1].norm()


def test_padded_sequences_decode_together(model: Any) -> None:
    """Each has the bits that it has with the others' padding as another's."""
    ids = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]])
    mask = (ids > 0).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = []
    for is_own in (False, True):
        if is_own:
            del model.__dict__["forward"]
        out = read(model, ids, attention_mask=mask, position_ids=positions)
        logits, now = [], mask
        for step in range(4):
            now = torch.cat([now, now.new_ones(2, 1)], 1)
            out = model(
                input_ids=torch.full((2, 1), 9 + step),
                past_key_values=out.past_key_values,
                attention_mask=now,
                position_ids=now.sum(1, keepdim=True) - 1,
            )
            logits.append(out.logits[:, -1])
        found.append(torch.cat(logits))
    assert num_steps(model) == 4
    assert (found[0] - found[1]).norm() < 3e-6 * found[1].norm()


def test_a_cache_of_inference_mode_goes_on_without(model: Any) -> None:
    """By a step, as a step would have gone on, and by the modules where they may."""
    with torch.inference_mode():
        cache = read(model).past_key_values
        model(input_ids=TOKEN, past_key_values=cache)
    found = model(input_ids=TOKEN, past_key_values=cache).logits
    other = read(model).past_key_values
    model(input_ids=TOKEN, past_key_values=other)
    assert torch.equal(found, model(input_ids=TOKEN, past_key_values=other).logits)


def test_a_step_that_fails_leaves_the_states_as_they_were(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its last layer; the same call gives the same bits as if nothing had happened."""
    path = write_checkpoint(FAMILIES["qwen3_5_moe"], tmp_path, "float32")
    # Of two rows some expert has no slot.
    model = load_in_slots(path, None, slots=1, compute="fast")
    token = torch.tensor([[3], [40]])
    with model.moecache, torch.no_grad():
        cache = read(model, prompt().expand(2, -1)).past_key_values
        model(input_ids=token, past_key_values=cache)
        expected = model(input_ids=token, past_key_values=copy.deepcopy(cache)).logits
        runtime = model.moecache.runtime
        waves, last = type(runtime).waves, runtime.layout.num_layers - 1

        def failing(self: Any, layer: int, ids: Any, **named: Any) -> Any:
            if layer == last:
                raise StoreError("the disk failed")
            return waves(self, layer, ids, **named)

        monkeypatch.setattr(type(runtime), "waves", failing)
        length = cache.get_seq_length()
        with pytest.raises(StoreError):
            model(input_ids=token, past_key_values=cache)
        assert cache.get_seq_length() == length
        monkeypatch.undo()
        assert torch.equal(model(input_ids=token, past_key_values=cache).logits, expected)
        assert num_steps(model) == 3
