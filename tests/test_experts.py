"""The routed feed-forward against a plain loop over tokens."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import moecache
from moecache import experts
from moecache.errors import ConfigError
from moecache.ranks import Placement, Share

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K = 6, 5, 9, 3


def make_store() -> moecache.MemoryStore:
    """Return one layer of random experts in float64."""
    rng = np.random.default_rng(0)
    return moecache.MemoryStore(
        {
            "gate_up": rng.normal(size=(1, NUM_EXPERTS, 2 * WIDTH, HIDDEN)),
            "down": rng.normal(size=(1, NUM_EXPERTS, HIDDEN, WIDTH)),
        },
        top_k=TOP_K,
    )


def plain(
    store: moecache.MemoryStore, hidden: np.ndarray, ids: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Return the routed output, token by token and choice by choice."""
    out = np.zeros_like(hidden)
    for token, (chosen, shares) in enumerate(zip(ids, weights, strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            if not 0 <= expert < NUM_EXPERTS:
                continue
            parts = store.view(0, int(expert))
            gate = parts["gate_up"][:WIDTH] @ hidden[token]
            up = parts["gate_up"][WIDTH:] @ hidden[token]
            out[token] += share * (parts["down"] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_feed_forward_is_the_weighted_sum_of_the_chosen_experts(num_tokens: int) -> None:
    """Gate, up and down in the right places, each pair with its weight."""
    rng = np.random.default_rng(num_tokens)
    store = make_store()
    hidden = rng.normal(size=(num_tokens, HIDDEN))
    ids = np.argsort(rng.random((num_tokens, NUM_EXPERTS)), axis=1)[:, :TOP_K]
    weights = rng.random((num_tokens, TOP_K))
    cache = moecache.ExpertCache(1, NUM_EXPERTS, 2)
    pool = moecache.HostSlots(store.layout, 4)
    with moecache.ExpertRuntime(store, pool, cache) as runtime:
        out = experts.feed_forward(runtime, 0, hidden, ids, weights)
        expected = plain(store, hidden, ids, weights)
    assert np.allclose(out, expected, rtol=1e-12, atol=1e-12)


def test_the_activation_can_be_chosen() -> None:
    """ReLU in the place of SiLU."""
    parts = make_store().view(0, 3)
    hidden = np.random.default_rng(1).normal(size=(4, HIDDEN))

    rows = experts.gated_rows(hidden, parts, lambda x: np.maximum(x, 0))

    gate, up = hidden @ parts["gate_up"][:WIDTH].T, hidden @ parts["gate_up"][WIDTH:].T
    assert np.allclose(rows, (np.maximum(gate, 0) * up) @ parts["down"].T)


def relu2(x: np.ndarray) -> np.ndarray:
    """Return the square of what is positive."""
    return np.square(np.maximum(x, 0))


def test_experts_without_a_gate_are_up_and_down() -> None:
    """With misses and hits, whatever was in the cache."""
    rng = np.random.default_rng(5)
    up = rng.normal(size=(1, NUM_EXPERTS, WIDTH, HIDDEN))
    down = rng.normal(size=(1, NUM_EXPERTS, HIDDEN, WIDTH))
    store = moecache.MemoryStore({"up": up, "down": down}, top_k=TOP_K)
    hidden = rng.normal(size=(7, HIDDEN))
    ids = np.argsort(rng.random((7, NUM_EXPERTS)), axis=1)[:, :TOP_K]
    weights = rng.random((7, TOP_K))
    pool = moecache.HostSlots(store.layout, 4)
    with moecache.ExpertRuntime(store, pool, moecache.ExpertCache(1, NUM_EXPERTS, 2)) as runtime:
        first, again = (
            experts.feed_forward(runtime, 0, hidden, ids, weights, relu2) for _ in range(2)
        )
    rows = relu2(np.einsum("ewd,td->tew", up[0], hidden))
    every = np.einsum("edw,tew->ted", down[0], rows)
    wanted = np.einsum("tk,tkd->td", weights, every[np.arange(7)[:, None], ids])
    assert np.allclose(first, wanted, rtol=1e-12, atol=1e-12)
    assert np.array_equal(first, again)


def test_an_expert_with_other_weights_is_refused() -> None:
    """Biases or scales that were left out would make the output silently wrong."""
    parts = {**make_store().view(0, 3), "down_bias": np.zeros(HIDDEN)}
    with pytest.raises(moecache.ConfigError, match="down, down_bias, gate_up"):
        experts.gated_rows(np.zeros((1, HIDDEN)), parts)
    parts["up"] = parts.pop("gate_up")[:WIDTH]
    with pytest.raises(moecache.ConfigError, match="down, down_bias, up"):
        experts.ungated_rows(np.zeros((1, HIDDEN)), parts, relu2)


def test_silu_is_stable() -> None:
    """Large values of either sign give no warning and the right limits."""
    x = np.array([-1e4, -90.0, -1.0, 0.0, 1.0, 90.0, 1e4], np.float32)
    expected = [0, 0, -1 / (1 + np.e), 0, 1 / (1 + np.exp(-1)), 90, 1e4]
    assert np.allclose(experts.silu(x), expected, atol=1e-6)
    assert experts.silu(x).dtype == np.float32


def test_combine_multiplies_before_it_casts() -> None:
    """float32 weights on float16 rows keep float32 until the end."""
    rows = np.full((4, 1), 1.0009765625, np.float16)
    weights = np.array([[0.3, 0.7], [0.1, 0.2]], np.float32)
    out = experts.combine(rows, weights)
    assert out.dtype == np.float32
    assert np.allclose(out[:, 0], weights.sum(1) * np.float32(1.0009765625))


def test_on_a_gpu_rows_are_named_by_their_places() -> None:
    """The error says how to name them."""
    ids, on_gpu = np.zeros((1, 2), int), SimpleNamespace(pool=SimpleNamespace(device=object()))
    with pytest.raises(moecache.ConfigError, match=r"begin_sequence\(batch=\)"):
        experts.feed_forward(on_gpu, 0, object(), ids, ids, sequences=[0])  # type: ignore[arg-type]


def opened(share: Share | None = None, **roles: tuple[int, ...]) -> moecache.ExpertRuntime:
    """Return a runtime over one layer of experts that are all ones."""
    arrays = {name: np.ones((1, 4, *shape), np.float32) for name, shape in roles.items()}
    store = moecache.MemoryStore(arrays, top_k=2)
    return moecache.ExpertRuntime(
        store, moecache.HostSlots(store.layout, 4), moecache.ExpertCache(1, 4, 4), share=share
    )


@pytest.mark.parametrize("compute", ["numpy", "fast"])
@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"down_bias": (8,)}, "down, down_bias, gate_up"),
        ({"gate_up_bias": (32,)}, "without biases"),
        ({"gate_up": (8, 32)}, r"gate_up \[8, 32\] and down \[8, 16\]"),
    ],
)
def test_experts_that_would_be_computed_wrong_are_refused(
    compute: str, roles: dict[str, tuple[int, ...]], message: str
) -> None:
    """Biases are those of gpt-oss, whose gate is another one than SiLU's as well."""
    with opened(**{"gate_up": (32, 8), "down": (8, 16), **roles}) as runtime:
        hidden, ids, weights = np.ones((1, 8), np.float32), np.array([[0, 1]]), np.ones((1, 2))
        with pytest.raises(moecache.ConfigError, match=message):
            experts.feed_forward(runtime, 0, hidden, ids, weights, compute=compute)


HIDDEN_5 = np.ones((5, 8), np.float32)
IDS = np.array([[0, 1]] * 5)
SHARES = np.ones((5, 2), np.float32)


@pytest.mark.parametrize("compute", ["numpy", "fast"])
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"weights": SHARES.T}, moecache.ConfigError, r"ids \[5, 2\] and weights \[2, 5\]"),
        ({"weights": SHARES.reshape(10, 1)}, moecache.ConfigError, r"weights \[10, 1\]"),
        ({"weights": SHARES.tolist()}, moecache.ConfigError, "weights is a list"),
        ({"hidden": HIDDEN_5[:3]}, moecache.ConfigError, r"both be \[3, top_k\]"),
        ({"hidden": np.ones((7, 8))}, moecache.ConfigError, r"both be \[7, top_k\]"),
        ({"hidden": HIDDEN_5[:, :4]}, moecache.ConfigError, r"\[5, 4\] must be \[num_tokens, 8"),
        ({"hidden": HIDDEN_5[None]}, moecache.ConfigError, r"hidden \[1, 5, 8\] must be"),
        ({"hidden": HIDDEN_5.astype(int)}, moecache.ConfigError, "hidden is int64"),
        ({"hidden": HIDDEN_5.tolist()}, moecache.ConfigError, "in RAM: give an array of NumPy"),
        ({"ids": IDS[0]}, moecache.ConfigError, r"ids \[2\]"),
        ({"ids": IDS.astype(float)}, TypeError, "int"),
        ({"ids": IDS + 3}, ValueError, "4"),
        ({"layer": 1}, ValueError, r"layer 1 is not in \[0, 1\)"),
        ({"layer": -1}, ValueError, r"layer -1"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(
    compute: str, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Most of them would give a result, and a wrong one."""
    given = {"layer": 0, "hidden": HIDDEN_5, "ids": IDS, "weights": SHARES, **changed}
    with opened(gate_up=(32, 8), down=(8, 16)) as runtime, pytest.raises(error, match=message):
        experts.feed_forward(runtime, **given, compute=compute)


def test_ids_may_be_lists() -> None:
    """As for `waves`."""
    with opened(gate_up=(32, 8), down=(8, 16)) as runtime:
        found = experts.feed_forward(runtime, 0, HIDDEN_5, IDS.tolist(), SHARES)  # type: ignore[arg-type]
        assert np.array_equal(found, experts.feed_forward(runtime, 0, HIDDEN_5, IDS, SHARES))


@pytest.mark.parametrize("compute", ["numpy", "fast"])
def test_experts_of_another_rank_add_nothing(compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows are never written, so new memory must not get into the sum."""
    monkeypatch.setattr(np, "empty", lambda shape, dtype=float: np.full(shape, 9, dtype))
    shares = [Share(Placement([[0, 0, 1, 1]], 2), rank) for rank in range(2)]
    ids = np.array([[0, 2], [0, 1], [3, 2]])
    parts = []
    for share in [None, *shares]:
        with opened(share, gate_up=(32, 8), down=(8, 16)) as runtime:
            parts.append(
                experts.feed_forward(runtime, 0, HIDDEN_5[:3], ids, SHARES[:3], compute=compute)
            )
    assert np.allclose(parts[0], parts[1] + parts[2])


def test_experts_that_are_stored_transposed_are_computed_once_the_store_knows(
    tmp_path: Path,
) -> None:
    """As rows are, by either way; before, the error names the remedy."""
    rng = np.random.default_rng(0)
    rows = {"gate_up": (4, 2 * 48, 32), "down": (4, 32, 48)}
    matrices = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in rows.items()}
    for turned in (False, True):
        (tmp_path / f"{turned}").mkdir()
        order = (0, 2, 1) if turned else (0, 1, 2)
        tensors = {
            f"model.layers.0.mlp.experts.{name}_proj": np.ascontiguousarray(array.transpose(order))
            for name, array in matrices.items()
        }
        save_file(tensors, tmp_path / f"{turned}" / "model.safetensors")
    given = rng.standard_normal((3, 32)).astype(np.float32)
    ids, weights = np.array([[0, 2], [3, 1], [2, 3]]), rng.random((3, 2)).astype(np.float32)

    with (
        moecache.open(tmp_path / "True", slots=2) as runtime,
        pytest.raises(ConfigError, match=r"transpose_roles\(\['down', 'gate_up'\]\)"),
    ):
        experts.feed_forward(runtime, 0, given, ids, weights)
    found = []
    for turned in (False, True):
        store = moecache.open_store(tmp_path / f"{turned}")
        store.transpose_roles(store.layout.find_transposed())
        with moecache.open(store, slots=2) as runtime:
            ways = [
                experts.feed_forward(runtime, 0, given, ids, weights, compute=compute)
                for compute in ("fast", "numpy")
            ]
        np.testing.assert_allclose(*ways, rtol=1e-4, atol=1e-4)
        found.append(ways)
    np.testing.assert_array_equal(*found)
