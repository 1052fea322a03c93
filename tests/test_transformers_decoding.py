"""A token as one call: near transformers' own forward, and the same bits wherever experts are."""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moecache
from moecache.errors import MoeCacheError, StoreError
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.kernels import computing
from tests.helpers.more_families import MORE_FAMILIES
from tests.helpers.offloading import generated, load_in_slots, load_whole, prompt

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

NAMES = (
    *("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "dots1", "deepseek_v2"),
    *("deepseek_v3", "minimax_m2", "ernie4_5_moe", "hunyuan_v1_moe", "granitemoe", "phimoe"),
    *("qwen3_vl_moe", "hy_v3", "exaone_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_vl"),
    *("granitemoeshared", "granitemoehybrid", "lfm2_moe", "nemotron_h"),
)
NUM_TOKENS = 10


@pytest.fixture(name="checkpoint", scope="module")
def _checkpoint(qwen3_moe: Path) -> Path:
    """Return the directory of a Qwen3-MoE in float32."""
    return qwen3_moe


@pytest.fixture(name="model")
def _model(checkpoint: Path) -> Iterator[Any]:
    """Return a model that decodes by a program, a quarter of its experts in slots."""
    model = load_in_slots(checkpoint, compute="fast")
    with model.moecache, torch.no_grad():
        yield model


def own_forward(model: Any) -> Any:
    """Have a model compute its forwards by its modules; return it."""
    del model.__dict__["forward"]
    return model


def num_steps(model: Any) -> int:
    """Return how many forwards a program computed."""
    found: int = model.moecache.decoder.num_steps
    return found


def decode(model: Any, ids: Any = None, num: int = NUM_TOKENS, **named: Any) -> Any:
    """Return the logits after a prompt and after each of some tokens, a call each."""
    ids = prompt() if ids is None else ids
    out = model(input_ids=ids, use_cache=True, **named)
    found = [out.logits[:, -1].float()]
    for i in range(num):
        token = torch.full((len(ids), 1), 7 + 3 * i)
        if "attention_mask" in named:
            mask = named["attention_mask"]
            named["attention_mask"] = torch.cat([mask, mask.new_ones(len(ids), 1)], 1)
            named["position_ids"] = named["attention_mask"].sum(1, keepdim=True) - 1
        out = model(input_ids=token, past_key_values=out.past_key_values, **named)
        found.append(out.logits[:, -1].float())
    return torch.stack(found, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_family_decodes_as_its_own_forward_does(tmp_path: Path, name: str) -> None:
    """In float32, at any number of slots, with one thread and with two; greedy tokens are equal."""
    family = {**MORE_FAMILIES, **FAMILIES}[name]
    path = write_checkpoint(family, tmp_path, "float32")
    whole = load_whole(family, path)
    with torch.no_grad():
        expected, tokens = decode(whole), generated(whole, num_tokens=24)
        found = []
        for memory, threads in (("100%", 1), ("100%", 2), (None, 1)):
            with computing(threads=threads):
                model = load_in_slots(path, memory, compute="fast")
                with model.moecache:
                    found.append(decode(model))
                    assert generated(model, num_tokens=24).tolist() == tokens.tolist()
                    assert num_steps(model) == NUM_TOKENS + 23, model.moecache.decoder.reason
    error = (found[0] - expected).norm() / expected.norm()
    assert error < 2e-6
    assert all(torch.equal(other, found[0]) for other in found[1:])


def test_hidden_states_are_float32_where_weights_are_bfloat16(tmp_path: Path) -> None:
    """Logits are nearer to those of the same weights in float32 than the modules' are."""
    family = FAMILIES["qwen3_moe"]
    path = write_checkpoint(family, tmp_path, "bfloat16")
    with torch.no_grad():
        exact = decode(load_whole(family, path))
        errors = []
        for is_own in (False, True):
            model = load_in_slots(path, "100%", compute="fast")
            with model.moecache:
                found = decode(own_forward(model) if is_own else model)
            # The prompt is computed by modules either way, and its keys and values are theirs.
            errors.append((found - exact)[:, 1:].norm().item())
    assert errors[0] < errors[1]


def test_a_row_has_the_bits_that_it_has_alone(model: Any) -> None:
    """Of four sequences, three of them padded on the left; and of several tokens at once."""
    lengths = (8, 5, 7, 2)
    ids, mask = torch.zeros((4, 8), dtype=torch.int64), torch.zeros((4, 8), dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, 8 - length :] = torch.arange(3, 3 + length) * (row + 2) % 90
        mask[row, 8 - length :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"attention_mask": mask, "position_ids": positions}
    out = model(input_ids=ids, use_cache=True, **given)
    cache = out.past_key_values
    alone = []
    for row in range(4):
        own = copy.deepcopy(cache)
        own.batch_select_indices(torch.tensor([row]))
        alone.append([])
        for i in range(6):
            seen = torch.cat([mask[row : row + 1], torch.ones(1, i + 1, dtype=torch.int64)], 1)
            token, place = torch.tensor([[5 + i + row]]), seen.sum(1, keepdim=True) - 1
            out = model(
                input_ids=token, past_key_values=own, attention_mask=seen, position_ids=place
            )
            alone[-1].append(out.logits[0, -1])
    before = num_steps(model)
    together, several = copy.deepcopy(cache), copy.deepcopy(cache)
    for i in range(6):
        seen = torch.cat([mask, torch.ones(4, i + 1, dtype=torch.int64)], 1)
        token, place = torch.arange(5 + i, 9 + i)[:, None], seen.sum(1, keepdim=True) - 1
        out = model(
            input_ids=token, past_key_values=together, attention_mask=seen, position_ids=place
        )
        for row in range(4):
            assert torch.equal(out.logits[row, -1], alone[row][i]), (row, i)
    seen = torch.cat([mask, torch.ones(4, 4, dtype=torch.int64)], 1)
    token = torch.arange(5, 9)[:, None] + torch.arange(4)
    place = mask.sum(1, keepdim=True) + torch.arange(4)
    out = model(input_ids=token, past_key_values=several, attention_mask=seen, position_ids=place)
    for row in range(4):
        assert torch.equal(out.logits[row], torch.stack(alone[row][:4])), row
    assert num_steps(model) == before + 7


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"num_beams": 2, "num_return_sequences": 2, "repetition_penalty": 1.3},
    ],
    ids=["beams", "lookup", "returned"],
)
def test_generate_crops_and_reorders_what_a_program_wrote(
    model: Any, options: dict[str, Any]
) -> None:
    """Beams and looked-up tokens give what they give without a program."""
    ids = torch.tensor([[5, 17, 99, 3, 5, 17, 99]])
    found = generated(model, ids, num_tokens=20, **options)
    assert num_steps(model) > 0
    assert found.tolist() == generated(own_forward(model), ids, num_tokens=20, **options).tolist()


def test_a_conversation_grows_over_many_pages(model: Any) -> None:
    """Keys and values move to larger memory, and logits stay those of a prompt read at once."""
    ids = torch.randint(1, 90, (1, 560), generator=torch.Generator().manual_seed(1))
    cache = model(input_ids=ids[:, :250], use_cache=True).past_key_values
    for i in range(250, 560):
        found = model(input_ids=ids[:, i : i + 1], past_key_values=cache).logits
    expected = model(input_ids=ids, use_cache=True).logits[:, -1:]
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_what_a_program_does_not_compute_goes_through_the_modules(model: Any) -> None:
    """Gradients, hooks, states that are asked for, other caches, masks with holes, float16."""
    import transformers

    cache = model(input_ids=prompt(), use_cache=True).past_key_values
    token = torch.tensor([[3]])

    def step(**named: Any) -> Any:
        given = {"past_key_values": copy.deepcopy(cache), **named}
        return model(input_ids=token, **given)

    step()
    assert num_steps(model) == 1
    assert step(output_hidden_states=True).hidden_states is not None
    assert len(step(return_dict=False)) == 2
    mask = torch.ones((1, 9), dtype=torch.int64)
    mask[0, 4] = 0
    step(attention_mask=mask)
    with torch.enable_grad():
        step().logits.sum().backward()
    static = transformers.StaticCache(config=model.config, max_cache_len=16)
    model(input_ids=prompt(), past_key_values=static)
    model(input_ids=token, past_key_values=static, position_ids=torch.tensor([[8]]))
    seen: list[Any] = []
    hook = model.model.layers[1].self_attn.register_forward_hook(lambda *_: seen.append(1))
    step()
    assert seen == [1]
    hook.remove()
    assert num_steps(model) == 1
    step()
    assert num_steps(model) == 2


def test_a_weight_that_is_replaced_is_read_again(model: Any) -> None:
    """Also one that is written to in place; a layer that is no plain one is left to its module."""
    cache = model(input_ids=prompt(), use_cache=True).past_key_values
    token = torch.tensor([[3]])

    def logits() -> tuple[Any, int]:
        out = model(input_ids=token, past_key_values=copy.deepcopy(cache)).logits
        return out, num_steps(model)

    first, _ = logits()
    layer = model.model.layers[0].self_attn.o_proj
    norm = model.model.norm.weight.data.clone()
    model.model.norm.weight.data.mul_(2)
    doubled, count = logits()
    assert torch.allclose(doubled, 2 * first, rtol=1e-5)
    assert count == 2
    model.model.norm.weight = torch.nn.Parameter(norm)
    again, _ = logits()
    assert torch.equal(again, first)
    layer.weight = torch.nn.Parameter(torch.zeros_like(layer.weight))
    other, count = logits()
    assert not torch.equal(other, first)
    assert count == 4

    class Doubled(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            return 2 * self.inner(x)

    model.model.layers[0].self_attn.v_proj = Doubled(model.model.layers[0].self_attn.v_proj)
    logits()
    assert num_steps(model) == 4


class Doubled(torch.nn.Embedding):  # type: ignore[misc]
    """An embedding that somebody patched."""

    def forward(self, given: Any) -> Any:
        """Return rows twice as large."""
        return 2 * super().forward(given)


def _turn_layers(model: Any) -> None:
    layers = model.model.layers._modules
    layers["0"] = layers.pop("0")


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "lm_head", torch.nn.Linear(48, 128)),
        lambda model: setattr(model.lm_head, "bias", torch.nn.Parameter(torch.ones(128))),
        lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.7),
        lambda model: setattr(model.model.norm, "variance_epsilon", 0.3),
        lambda model: [
            setattr(module, "top_k", 1) for module in model.modules() if hasattr(module, "top_k")
        ],
        lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
        lambda model: setattr(
            model.model.embed_tokens, "weight", torch.nn.Parameter(torch.ones(128, 48))
        ),
        lambda model: model.model.embed_tokens.weight.data.mul_(0.5),
        lambda model: setattr(model.model, "embed_tokens", torch.nn.Embedding(128, 48)),
        lambda model: setattr(model.model.embed_tokens, "max_norm", 0.1),
        lambda model: setattr(
            model.model.norm.weight, "data", 2 * model.model.norm.weight.data.clone()
        ),
        lambda model: setattr(model.model.embed_tokens, "__class__", Doubled),
        _turn_layers,
        lambda model: setattr(model.model.norm, "forward", torch.zeros_like),
    ],
    ids=[
        "head",
        "bias",
        "scaling",
        "epsilon",
        "top_k",
        "frequencies",
        "embedding",
        "embedding in place",
        "other embedding",
        "embedding norm",
        "data",
        "embedding class",
        "order",
        "forward",
    ],
)
def test_what_changes_between_tokens_counts(model: Any, change: Any) -> None:
    """Modules, numbers and forwards that a program has read are looked at before each token."""
    cache = model(input_ids=prompt(), use_cache=True).past_key_values
    token = torch.tensor([[3]])
    model(input_ids=token, past_key_values=copy.deepcopy(cache))
    num = num_steps(model)
    change(model)
    found = model(input_ids=token, past_key_values=copy.deepcopy(cache)).logits
    has_recipe = num_steps(model) > num
    # Hidden states are asked for: that is the modules' answer.
    wanted = model(
        input_ids=token, past_key_values=copy.deepcopy(cache), output_hidden_states=True
    ).logits
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    in_order = next(iter(model.model.layers)).self_attn.layer_idx == 0
    assert has_recipe == ("forward" not in model.model.norm.__dict__ and in_order)


def test_a_global_hook_sees_every_module(model: Any) -> None:
    """As profilers and calibrators expect it."""
    cache = model(input_ids=prompt(), use_cache=True).past_key_values
    seen: list[Any] = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        model(input_ids=torch.tensor([[3]]), past_key_values=cache)
    finally:
        hook.remove()
    assert len(seen) > 10


def test_a_cache_of_inference_mode_goes_on_without(model: Any) -> None:
    """As transformers' own does."""
    token = torch.tensor([[3]])
    with torch.inference_mode():
        cache = model(input_ids=prompt(), use_cache=True).past_key_values
        model(input_ids=token, past_key_values=cache)
    found = model(input_ids=prompt().repeat(1, 4), past_key_values=cache).logits
    other = model(input_ids=prompt(), use_cache=True).past_key_values
    model(input_ids=token, past_key_values=other)
    assert torch.equal(found, model(input_ids=prompt().repeat(1, 4), past_key_values=other).logits)


def test_a_hook_that_was_there_first_may_go(model: Any) -> None:
    """What is no plain model at its first token is looked at again, and the report says so."""
    seen: list[Any] = []
    hook = model.model.layers[1].self_attn.register_forward_hook(lambda *_: seen.append(1))
    decode(model, num=3)
    assert num_steps(model) == 0
    assert len(seen) == 4
    assert "has hooks" in model.moecache.report()
    hook.remove()
    decode(model, num=8)
    assert num_steps(model) >= 4
    assert "tokens are one call each" in model.moecache.report()


def test_a_step_that_fails_leaves_the_cache_as_it_was(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same call gives the same bits as if nothing had happened."""
    cache = model(input_ids=prompt(), use_cache=True).past_key_values
    token = torch.tensor([[3]])
    expected = model(input_ids=token, past_key_values=copy.deepcopy(cache)).logits
    runtime = model.moecache.runtime
    waves, num_calls = type(runtime).waves, 0

    def failing(self: Any, layer: int, ids: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if layer == 1:
            raise StoreError("the disk failed")
        return waves(self, layer, ids, **named)

    # A layer of which something is missing: other tokens have driven it out.
    pair = copy.deepcopy(cache)
    pair.batch_repeat_interleave(2)
    for other in range(20, 60):
        model(input_ids=torch.tensor([[other]]), past_key_values=copy.deepcopy(cache))
    monkeypatch.setattr(type(runtime), "waves", failing)
    with pytest.raises(StoreError):
        model(input_ids=token.expand(2, 1), past_key_values=pair)
    assert num_calls > 0
    assert pair.get_seq_length() == cache.get_seq_length() == 8
    monkeypatch.undo()
    found = model(input_ids=token.expand(2, 1), past_key_values=pair).logits
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[0])
    assert pair.get_seq_length() == 9


@pytest.mark.parametrize("memory", ["25%", "100%"])
def test_statistics_are_those_of_the_modules(checkpoint: Path, memory: str) -> None:
    """Steps, hits, misses, products and the table of what is resident."""
    found = []
    for is_own in (False, True):
        model = load_in_slots(checkpoint, memory, compute="fast", prefetch="off")
        with model.moecache, torch.no_grad():
            if is_own:
                own_forward(model)
            before = model.moecache.stats()
            decode(model, num=30)
            spent = model.moecache.stats() - before
            table = model.moecache.runtime.cache.slot_table.copy()
            products = model.moecache.num_products
            kernels = [layer.kernel for layer in model.moecache._layers]
            found.append(
                (
                    spent.num_hits,
                    spent.num_misses,
                    spent.num_evictions,
                    spent.num_steps,
                    spent.num_resident_steps,
                    products,
                    [kernel.num_computed for kernel in kernels],
                    [kernel.busy_ns > 0 for kernel in kernels],
                    table.tolist(),
                )
            )
    assert found[0] == found[1]


def test_products_are_counted_over_a_changed_weight_and_the_end(checkpoint: Path) -> None:
    """Another program goes on counting where the last one stopped, and so it stays once closed."""
    model = load_in_slots(checkpoint, "100%", compute="fast", prefetch="off")
    with model.moecache as offload, torch.no_grad():
        decode(model, num=20)
        before = offload.num_products
        decode(model, num=4)
        model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * 2)
        decode(model, num=4)
        assert offload.num_products > before
        between = offload.num_products
        decode(model, num=4)
        num = offload.num_products - between
        offload.compute_stats()
        assert offload.num_products - between == num
        decode(model, num=4)
    assert offload.num_products == between + 2 * num


@pytest.mark.parametrize("token", [-1, 128])
def test_a_token_of_no_vocabulary_is_an_error(model: Any, token: int) -> None:
    """Nothing is lost: the next token has the bits that it would have had."""
    cache = model(input_ids=prompt(), use_cache=True).past_key_values
    wanted = model(input_ids=torch.tensor([[3]]), past_key_values=copy.deepcopy(cache)).logits
    with pytest.raises(IndexError, match=f"token {token} is not one of 128"):
        model(input_ids=torch.tensor([[token]]), past_key_values=cache)
    with pytest.raises(IndexError, match=f"token {token} is not one of 128"):
        model.moecache.decoder.step_together([token], [cache])
    found = model(input_ids=torch.tensor([[3]]), past_key_values=cache).logits
    assert torch.equal(found, wanted)


def test_the_own_forward_is_back_when_the_cache_is_closed(checkpoint: Path) -> None:
    """`detach` gives the model back as transformers made it."""
    model = load_in_slots(checkpoint, compute="fast")
    assert "forward" in model.__dict__
    model.moecache.detach()
    assert "forward" not in model.__dict__
    model = load_in_slots(checkpoint, compute="torch")
    with model.moecache:
        assert "forward" not in model.__dict__


def test_a_closed_runtime_is_an_error_of_the_token(checkpoint: Path) -> None:
    """Slots are gone then, also where every expert was resident."""
    from moecache.integrations.transformers import attach

    whole = load_whole(FAMILIES["qwen3_moe"], checkpoint)
    runtime = moecache.open(checkpoint, memory="100%", dtype="float32")
    attach(whole, runtime, compute="fast")
    with torch.no_grad():
        cache = whole(input_ids=prompt(), use_cache=True).past_key_values
        whole(input_ids=torch.tensor([[3]]), past_key_values=cache)
        assert num_steps(whole) == 1
        runtime.close()
        with pytest.raises(MoeCacheError, match="closed"):
            whole(input_ids=torch.tensor([[3]]), past_key_values=cache)
        assert cache.get_seq_length() == 9


def test_the_report_says_how_tokens_are_computed(tmp_path: Path, model: Any) -> None:
    """And why not by a call, where a family has no recipe."""
    decode(model, num=3)
    assert "tokens are one call each; 3 were" in model.moecache.report()
    path = write_checkpoint(FAMILIES["jamba"], tmp_path, "float32")
    other = load_in_slots(path, compute="fast")
    with other.moecache:
        decode(other, num=2)
        assert "go through the model's modules: " in other.moecache.report()


def test_two_threads_have_the_bits_of_one(model: Any) -> None:
    """Each with a cache of its own."""
    expected = decode(model)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: torch.no_grad()(decode)(model), range(4)))
    assert all(torch.equal(other, expected) for other in found)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_growing_layer_is_transformers_own(data: st.DataObject) -> None:
    """Whatever is done to a cache: its tensors are those of a DynamicLayer."""
    from transformers.cache_utils import DynamicLayer

    from moecache.integrations.transformers._cache_layers import GrowingLayer

    layers = DynamicLayer(), GrowingLayer()
    for seed in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["update", "crop", "reorder", "repeat", "reset", "copy"]))
        rows = 0 if not layers[0].is_initialized else len(layers[0].keys)
        length = layers[0].get_seq_length()
        if what == "update" or not length:
            num = data.draw(st.sampled_from([1, 2, 7, 255, 300]))
            keys = torch.randn(
                (rows or 2, 2, num, 3), generator=torch.Generator().manual_seed(seed)
            )
            results = [layer.update(keys, keys[..., :2] + 1) for layer in layers]
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        elif what == "crop":
            num = data.draw(st.integers(1, length))
            for layer in layers:
                layer.crop(-num)
        elif what == "reorder":
            order = torch.tensor(
                data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=3))
            )
            for layer in layers:
                layer.reorder_cache(order)
        elif what == "repeat" and rows < 5:
            for layer in layers:
                layer.batch_repeat_interleave(2)
        elif what == "reset":
            for layer in layers:
                layer.reset()
        else:
            layers = copy.deepcopy(layers)
        own, ours = layers
        assert own.get_seq_length() == ours.get_seq_length()
        if own.is_initialized:
            assert torch.equal(own.keys, ours.keys)
            assert torch.equal(own.values, ours.values)


def test_angles_are_those_of_the_rotary_module(model: Any) -> None:
    """Kept or not, at any position; one for each pair."""
    from moecache.integrations.transformers._places import Rotary

    module = model.model.rotary_emb
    positions = np.array([0, 5, 1023, 1024, 3000])
    expected = module(torch.empty((1, 1, 1)), torch.from_numpy(positions)[None])
    width = expected[0].shape[-1]
    for is_static in (True, False):
        rotary = Rotary(module, width)
        rotary._is_static = is_static
        for found, whole in zip(rotary.angles(positions), expected, strict=True):
            assert torch.equal(torch.from_numpy(found), whole[0, :, : width // 2])


def test_a_position_far_away_makes_no_angles_of_all_before_it(model: Any) -> None:
    """Its own alone, which are the same; near ones are made block by block."""
    from moecache.integrations.transformers._places import _FAR, Rotary

    width = 2 * model.model.rotary_emb.inv_freq.numel()
    rotary, other = (Rotary(model.model.rotary_emb, width) for _ in range(2))
    far = np.array([10 * _FAR, 3])
    for found, whole in zip(rotary.angles(far), rotary._compute(far), strict=True):
        assert np.array_equal(found, whole)
    assert len(rotary._cos) == 0
    for position in (5, 1500, 5000):
        for found, whole in zip(
            rotary.angles(np.array([position])), other._compute(np.array([position])), strict=True
        ):
            assert np.array_equal(found, whole)
    assert len(rotary._cos) == 5 * 1024
