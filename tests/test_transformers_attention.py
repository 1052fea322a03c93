"""Attention of one token: transformers' values, whatever shape it is computed in."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, WIDTH, LENGTH = 3, 32, 40


def made(num_heads: int, num_kv_heads: int, dtype: Any, num_tokens: int = 1) -> tuple[Any, ...]:
    """Return query, key and value; values are narrower, as in latent attention."""
    shapes = (
        (num_heads, num_tokens, WIDTH),
        (num_kv_heads, LENGTH, WIDTH),
        (num_kv_heads, LENGTH, 24),
    )
    generator = torch.Generator().manual_seed(num_heads)
    return tuple(torch.randn(BATCH, *shape, generator=generator).to(dtype) for shape in shapes)


def expected(query: Any, key: Any, value: Any, mask: Any, scaling: float | None) -> Any:
    """Return the softmax of scores times values, in float64."""
    groups = query.shape[1] // key.shape[1]
    key, value = (one.double().repeat_interleave(groups, 1) for one in (key, value))
    scores = query.double() @ key.mT * (WIDTH**-0.5 if scaling is None else scaling)
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    return (scores.softmax(-1) @ value).transpose(1, 2)


def masks() -> dict[str, Any]:
    """Return masks as models give them: none, left padding, and numbers for each head."""
    padding = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    padding[1, ..., :7] = False
    generator = torch.Generator().manual_seed(0)
    return {
        "none": None,
        "padding": padding,
        "bias": torch.randn(BATCH, 8, 1, LENGTH, generator=generator),
    }


@pytest.mark.parametrize("mask", ["none", "padding", "bias"])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_token_has_the_values_of_attention(dtype: Any, num_kv_heads: int, mask: str) -> None:
    """Where heads share keys and where they do not, with masks of all kinds, scaled or not."""
    from moecache.integrations.transformers._attention import attend

    query, key, value = made(8, num_kv_heads, dtype)
    given = masks()[mask]
    given = given.to(dtype) if mask == "bias" else given
    for scaling in (None, 0.3):
        module = SimpleNamespace(num_key_value_groups=8 // num_kv_heads)
        found, weights = attend(module, query, key, value, given, scaling=scaling)
        assert weights is None
        assert found.shape == (BATCH, 1, 8, 24)
        assert found.dtype == dtype
        wanted = expected(query, key, value, given, scaling)
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        assert (found.double() - wanted).abs().max() < bound


@pytest.mark.parametrize("num_kv_heads", [2, 8])
def test_a_sequence_has_the_same_bits_alone(num_kv_heads: int) -> None:
    """Other sequences of a batch change nothing."""
    from moecache.integrations.transformers._attention import attend

    query, key, value = made(8, num_kv_heads, torch.bfloat16)
    module = SimpleNamespace(num_key_value_groups=8 // num_kv_heads)
    together, _ = attend(module, query, key, value, None)
    for row in range(BATCH):
        one = slice(row, row + 1)
        alone, _ = attend(module, query[one], key[one], value[one], None)
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("options", [{"num_tokens": 3}, {"dropout": 0.5}, {"position_bias": True}])
def test_what_is_no_single_token_is_transformers_own(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Several tokens, dropout, and biases that are added to scores."""
    from moecache.integrations.transformers import _attention

    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        _attention, "sdpa_attention_forward", lambda *_, **given: calls.append(given)
    )
    query, key, value = made(8, 2, torch.float32, options.pop("num_tokens", 1))
    _attention.attend(SimpleNamespace(), query, key, value, None, scaling=0.5, **options)
    assert calls == [{"dropout": 0.0, "scaling": 0.5} | options]


def test_a_model_gets_its_attention_back(tmp_path: Any) -> None:
    """With compute="fast" alone, and until it is detached; other models have their own."""
    from moecache.integrations.transformers import _attention, load
    from tests.helpers.families import FAMILIES, write_checkpoint

    path = write_checkpoint(FAMILIES["qwen3_moe"], tmp_path / "model", "bfloat16")
    before = load(path, memory="50%", compute="torch")
    model = load(path, memory="50%", compute="fast")

    def function_of(one: Any) -> Any:
        attention = one.model.layers[0].self_attn
        found = type(attention).forward.__globals__["ALL_ATTENTION_FUNCTIONS"]
        return found.get_interface("sdpa", None)

    assert function_of(model) is _attention.attend
    assert function_of(before) is not _attention.attend
    model.moecache.detach()
    assert function_of(model) is function_of(before)
    before.moecache.close()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_goes_through_the_kernel(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, num_kv_heads: int
) -> None:
    """With the masks that transformers makes of a causal page and of padding."""
    from moecache.integrations.transformers import _attention

    asked: list[int] = []
    attend = _attention._page.attend

    def noted(**options: Any) -> None:
        asked.append(options["num_queries"])
        attend(**options)

    monkeypatch.setattr(_attention._page, "attend", noted)
    query, key, value = made(8, num_kv_heads, dtype, LENGTH)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
    padded = causal.repeat(BATCH, 1, 1, 1)
    padded[1, ..., 1:7] = False
    for mask in (None, causal, padded):
        found, _ = _attention.attend(SimpleNamespace(), query, key, value, mask)
        wanted = expected(query, key, value, causal if mask is None else mask, None)
        assert found.dtype == dtype
        assert (found.double() - wanted).norm() / wanted.norm() < (
            2e-6 if dtype == torch.float32 else 4e-3
        )
    assert asked == [LENGTH] * 3 * BATCH


def test_what_the_kernel_does_not_know_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of numbers, another type, gradients, and a page that is not causal."""
    from moecache.integrations.transformers import _attention

    def refused(**_: Any) -> None:
        pytest.fail("the kernel was asked")

    monkeypatch.setattr(_attention._page, "attend", refused)
    query, key, value = made(8, 2, torch.float32, LENGTH)
    bias = torch.zeros(1, 1, LENGTH, LENGTH)
    module = SimpleNamespace(num_key_value_groups=4)
    _attention.attend(module, query, key, value, bias)
    _attention.attend(module, query, key, value, None, is_causal=False)
    _attention.attend(module, query[:, :, :3], key, value, None)
    _attention.attend(module, query.requires_grad_(), key, value, None)
    half = [one.detach().half() for one in (query, key, value)]
    _attention.attend(module, *half, None)
