"""Every family's output with experts in slots equals that of the model in memory, bit for bit."""

import copy
from pathlib import Path
from typing import Any

import pytest

import moecache
from moecache.errors import ConfigError, MoeCacheError
from tests.helpers import family_settings
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.more_families import MORE_FAMILIES
from tests.helpers.nightly import some
from tests.helpers.offloading import load_whole, realigned
from tests.helpers.pairs import pairwise

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

DOCS = Path(__file__).parents[1] / "docs" / "transformers.md"
SUPPORTED = list(FAMILIES)
NUM_TOKENS = 8
# One for each way that experts lie on disk: matrices of each, stacks, with biases, without gates,
# under names of their own.
GENERATE = (
    *("qwen3_moe", "mixtral", "qwen3_vl_moe", "gpt_oss", "granitemoe", "lfm2_moe", "nemotron_h"),
    *("aria", "inkling2"),
)
ERNIE_VL = "ernie4_5_vl_moe"
SIZES = ("a quarter", "one layer")
DTYPES = ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    some(
        pairwise(SUPPORTED, DTYPES, SIZES),
        # Each family once, in turns in either type; in bfloat16 others have a quarter below.
        lambda case: (SUPPORTED.index(case[0]) + DTYPES.index(case[1])) % 2 == 0,
    ),
)
def test_logits_and_greedy_tokens_equal_those_of_the_model_in_memory(
    tmp_path: Path, name: str, dtype: str, size: str
) -> None:
    """With a quarter of the experts and look-ahead, or with no more than one layer has."""
    family, path = FAMILIES[name], tmp_path / name
    write_checkpoint(family, path, dtype)
    _check_outputs(path, _outputs(load_whole(family, path, dtype)), dtype, size)


@pytest.mark.parametrize("name", MORE_FAMILIES)
def test_so_do_those_of_other_families(tmp_path: Path, name: str) -> None:
    """In bfloat16, with a quarter of the experts and look-ahead."""
    family, path = MORE_FAMILIES[name], tmp_path / name
    if not hasattr(transformers, family.prefix + family.config_suffix):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    write_checkpoint(family, path, "bfloat16")
    expected = _outputs(load_whole(family, path, "bfloat16"))
    _check_outputs(path, expected, "bfloat16", "a quarter")


@pytest.mark.parametrize("name", GENERATE)
def test_generated_tokens_equal_those_of_the_model_in_memory(tmp_path: Path, name: str) -> None:
    """By transformers' own loop, with as many slots as one layer has experts."""
    from moecache.integrations.transformers import load

    family, path = {**FAMILIES, **MORE_FAMILIES}[name], tmp_path / name
    if not hasattr(transformers, family.prefix + family.config_suffix):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    write_checkpoint(family, path, "bfloat16")
    wanted = _generated(load_whole(family, path, "bfloat16"))
    model = load(path, slots=_layout(path).num_experts)
    with model.moecache:
        assert torch.equal(_generated(model), wanted)


def _check_outputs(path: Path, wanted: list[Any], dtype: str, size: str) -> None:
    """Compare the outputs of a model in slots with those of the model in memory."""
    from moecache.integrations.transformers import load

    layout = _layout(path)
    if size == "a quarter":
        model = realigned(load(path, slots=layout.total_experts // 4, prefetch="router"))
    else:
        model = realigned(load(path, slots=layout.num_experts))
    with model.moecache as offload:
        assert model.dtype == getattr(torch, dtype)
        parameters = [name for name, _ in model.named_parameters()]
        assert not [name for name in parameters if name.endswith(".experts.down_proj")]
        for found, expected in zip(_outputs(model), wanted, strict=True):
            assert torch.equal(found, expected)
        # Nothing was right because all was there.
        stats = offload.stats()
        assert stats.prefetch is not None
        assert stats.prefetch.num_predictor_errors == 0
        if model.can_generate():
            assert stats.num_misses > stats.capacity
            assert size == "one layer" or stats.prefetch.num_found_k > 0


def test_rows_that_alternate_in_the_checkpoint_alone_are_put_in_order(tmp_path: Path) -> None:
    """Inkling's: by kernels as by torch, and when the model gets its experts back."""
    from moecache.integrations.transformers import load

    family, path = MORE_FAMILIES["inkling"], tmp_path / "inkling"
    if not hasattr(transformers, "InklingTextConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no inkling")
    write_checkpoint(family, path, "float32")
    logits = _outputs(load_whole(family, path))[0]
    model = load(path, slots=4, compute="fast")
    torch.testing.assert_close(_outputs(model)[0], logits, rtol=1e-4, atol=1e-4)
    model.moecache.detach()
    assert torch.equal(_outputs(realigned(model))[0], logits)


def test_experts_for_text_and_for_images_are_of_two_widths(tmp_path: Path) -> None:
    """ERNIE's: numbered as one layer's in the checkpoint; a prompt may have tokens of both."""
    from moecache.integrations.transformers import load

    path = tmp_path / ERNIE_VL
    if not hasattr(transformers, "Ernie4_5_VLMoeConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no {ERNIE_VL}")
    model_class = transformers.Ernie4_5_VLMoeForConditionalGeneration
    torch.manual_seed(0)
    config = transformers.Ernie4_5_VLMoeConfig(
        text_config=copy.deepcopy(dict(family_settings.ERNIE4_5_VL_MOE)),
        vision_config={**family_settings.VISION, "hidden_size": 32},
        **{f"{name}_token_id": 110 + place for place, name in enumerate(("image", "video"))},
    )
    made = model_class(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    made.save_pretrained(path)

    whole, layout = realigned(model_class.from_pretrained(path)), _layout(path)
    assert layout.layer_names[2:] == tuple(f"{name} group 1" for name in layout.layer_names[:2])
    ids = torch.arange(18).reshape(2, 9) * 7 % 100
    for is_fast in (False, True):
        model = realigned(load(path, slots=9, compute="fast" if is_fast else "torch"))
        for num_image in (0, 1, 3, 9):
            kinds = torch.zeros_like(ids, dtype=torch.int32)
            kinds[:, :num_image] = 1
            given = {"input_ids": ids, "mm_token_type_ids": kinds, "moe_mm_token_type_ids": kinds}
            with torch.no_grad():
                found, wanted = model(**given).logits, whole(**given).logits
            close = torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
            assert close if is_fast else torch.equal(found, wanted)
        for found, wanted in zip(_outputs(model), _outputs(whole), strict=True):
            assert is_fast or torch.equal(found, wanted)
        assert model.moecache.stats().num_evictions > 0
        model.moecache.detach()
        for found, wanted in zip(_outputs(realigned(model)), _outputs(whole), strict=True):
            assert torch.equal(found, wanted)


def test_experts_that_do_nothing_are_never_read(tmp_path: Path) -> None:
    """LongCat's: the store has none, and a model that gets its experts back is as it was."""
    from moecache.integrations.transformers import load

    family, path = MORE_FAMILIES["longcat_flash"], tmp_path / "longcat"
    write_checkpoint(family, path, "float32")
    expected = _outputs(load_whole(family, path))
    model = load(path, slots=4)
    assert model.moecache.runtime.layout.num_experts == 8
    with pytest.raises(MoeCacheError, match="LongCat-Flash cannot be trained through"):
        model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()
    model.moecache.detach()
    for found, wanted in zip(_outputs(realigned(model)), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_runtime_that_reads_stacks_as_they_are_stored_is_refused(tmp_path: Path) -> None:
    """The message names the roles, and what makes slots take them as the model has them."""
    from moecache.integrations.transformers import attach

    family = FAMILIES["qwen3_vl_moe_hub"]
    path = write_checkpoint(family, tmp_path, "float32")
    model = load_whole(family, path)
    expected = _outputs(model)
    problem = r"as \[in, out\].*transpose_roles\(\['down', 'gate"
    with moecache.open(path, "50%") as runtime, pytest.raises(ConfigError, match=problem):
        attach(model, runtime)
    oss = write_checkpoint(FAMILIES["gpt_oss"], tmp_path / "oss", "float32")
    problem = r"stored transposed.*transpose_roles\(store.layout.find_transposed\(\)\)"
    with moecache.open(oss, "50%") as runtime, pytest.raises(ConfigError, match=problem):
        attach(load_whole(FAMILIES["gpt_oss"], oss), runtime, compute="fast")
    store = moecache.open_store(path)
    store.transpose_roles(["gate_up", "down"])
    with moecache.open(store, "50%") as runtime, attach(model, runtime, compute="torch"):
        for found, wanted in zip(_outputs(model), expected, strict=True):
            assert torch.equal(found, wanted)


def test_the_documentation_names_the_families_that_are_tested() -> None:
    """Its table has a row for each, and none for another."""
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    named = [row.split("`")[1] for row in rows]
    tested = [*SUPPORTED, *MORE_FAMILIES, ERNIE_VL]
    assert sorted(named) == sorted(name for name in tested if not name.endswith("_hub"))


def _outputs(model: Any) -> list[Any]:
    """Return the logits of a prompt and of two tokens after it, which use the cache of keys."""
    ids, found = torch.arange(24)[None] * 7 % 120, []
    if not model.can_generate():
        return [model(input_ids=ids).logits.detach()]
    given = {"use_cache": True}
    for step in range(3):
        with torch.no_grad():
            out = model(input_ids=ids, **given)
        found.append(out.logits)
        assert out.past_key_values is not None
        given["past_key_values"] = out.past_key_values
        ids = torch.tensor([[3 + 37 * step % 120]])
    return found


def _generated(model: Any) -> Any:
    return model.generate(
        input_ids=torch.arange(12)[None] * 7 % 120,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
    )


def _layout(path: Path) -> Any:
    from moecache.stores import open_store

    with open_store(path) as store:
        return store.layout
