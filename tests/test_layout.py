"""The layout of a model's experts."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecache.errors import ConfigError
from moecache.layout import ExpertLayout, Role


def _role(name: str, *shape: int, dtype: type = np.float32) -> Role:
    return Role(name, shape, np.dtype(dtype))


def _uneven() -> ExpertLayout:
    wide = [_role("gate_up", 8, 4), _role("down", 4, 4)]
    narrow = [_role("gate_up", 4, 4), _role("down", 4, 8), _role("down_bias", 4)]
    return ExpertLayout(6, 2, [wide, narrow], ["model.layers.1.mlp", "model.layers.2.mlp"])


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(np.float32, 96), (ml_dtypes.bfloat16, 48), (ml_dtypes.float8_e4m3fn, 24)],
)
def test_bytes_of_a_role_are_elements_times_item_size(dtype: type, expected: int) -> None:
    """The dtype is the stored one, narrow types included."""
    assert Role("down", (4, 6), np.dtype(dtype)).nbytes == expected


def test_a_role_without_dimensions_is_one_element() -> None:
    """A scalar has the size of its dtype."""
    assert _role("down_scale").nbytes == 4


def test_the_bytes_of_an_expert_are_those_of_its_layer() -> None:
    """Layers of different widths have experts of different sizes."""
    layout = _uneven()

    assert layout.expert_bytes(0) == (32 + 16) * 4
    assert layout.expert_bytes(1) == (16 + 32 + 4) * 4


def test_a_slot_takes_the_widest_layer_of_every_role() -> None:
    """It is wider than any single expert when layers differ per role."""
    layout = _uneven()

    assert layout.slot_bytes == (32 + 32 + 4) * 4


def test_totals_cover_all_layers() -> None:
    """Experts and bytes are summed over the layers."""
    layout = _uneven()

    assert layout.num_layers == 2
    assert layout.total_experts == 12
    assert layout.total_bytes == 6 * (layout.expert_bytes(0) + layout.expert_bytes(1))


def test_roles_are_named_once_in_the_order_of_the_layers() -> None:
    """A role that only a later layer has comes last."""
    assert _uneven().role_names == ("gate_up", "down", "down_bias")


def test_layers_keep_the_names_of_the_model() -> None:
    """Numbers count MoE layers, names are the file's own."""
    assert _uneven().layer_names == ("model.layers.1.mlp", "model.layers.2.mlp")


def test_layers_without_names_are_numbered() -> None:
    """Planning needs no names."""
    layout = ExpertLayout.uniform(num_layers=3, num_experts=4, top_k=1, expert_bytes=10)

    assert layout.layer_names == ("0", "1", "2")


def test_a_uniform_layout_has_equal_layers() -> None:
    """Every expert is one role of the given bytes."""
    layout = ExpertLayout.uniform(num_layers=3, num_experts=8, top_k=2, expert_bytes=1000)

    assert (layout.num_layers, layout.num_experts, layout.top_k) == (3, 8, 2)
    assert [layout.expert_bytes(layer) for layer in range(3)] == [1000] * 3
    assert layout.slot_bytes == 1000
    assert layout.total_bytes == 24_000


def test_a_layout_is_independent_of_the_lists_it_was_made_from() -> None:
    """Later changes to the caller's lists have no effect."""
    layers = [[_role("down", 4)]]
    names = ["a"]
    layout = ExpertLayout(2, 1, layers, names)

    layers[0].append(_role("up", 4))
    layers.append([])
    names[0] = "b"

    assert layout.num_layers == 1
    assert layout.role_names == ("down",)
    assert layout.layer_names == ("a",)


def test_equal_layouts_compare_and_hash_equal() -> None:
    """Layouts are values."""
    assert _uneven() == _uneven()
    assert hash(_uneven()) == hash(_uneven())


@given(st.integers(1, 50), st.integers(1, 50))
def test_keys_number_all_experts_without_gaps(num_layers: int, num_experts: int) -> None:
    """Keys are layer-major and count from 0."""
    layout = ExpertLayout.uniform(
        num_layers=num_layers, num_experts=num_experts, top_k=1, expert_bytes=1
    )

    keys = [layout.key(layer, e) for layer in range(num_layers) for e in range(num_experts)]

    assert keys == list(range(layout.total_experts))


@pytest.mark.parametrize("layer", [-1, 2, 2**40])
def test_a_layer_that_is_not_there_is_named(layer: int) -> None:
    """The message has the layer and the range."""
    with pytest.raises(ValueError, match=rf"layer {layer} is not in \[0, 2\)"):
        _uneven().check(layer, 0)


@pytest.mark.parametrize("expert", [-1, 6, 2**40])
def test_an_expert_that_is_not_there_is_named(expert: int) -> None:
    """The message has the expert and the range; a key would be another expert's."""
    with pytest.raises(ValueError, match=rf"expert {expert} is not in \[0, 6\)"):
        _uneven().key(0, expert)


def test_names_must_match_the_layers() -> None:
    """The message has both numbers."""
    with pytest.raises(ConfigError, match="1 layer names for 2 layers"):
        ExpertLayout(2, 1, [[], []], ["a"])


@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 5), (4, -1), (-1, 0), (0, 1)])
def test_impossible_figures_are_config_errors(num_experts: int, top_k: int) -> None:
    """A token cannot use more experts than there are."""
    with pytest.raises(ConfigError, match=f"top-{top_k} of {num_experts} experts"):
        ExpertLayout(num_experts, top_k, [[]])


def test_a_model_without_experts_is_an_empty_layout() -> None:
    """Every figure is zero and no key exists."""
    layout = ExpertLayout(0, 0, [])

    assert (layout.total_experts, layout.total_bytes, layout.slot_bytes) == (0, 0, 0)
    assert layout.role_names == ()
    with pytest.raises(ValueError, match="layer 0"):
        layout.key(0, 0)


def test_roles_that_are_stored_transposed_are_shown_as_they_will_be() -> None:
    """Their bytes are as before, and the layout that they were is."""
    roles = [Role("gate_up", (8, 6), np.dtype("f4")), Role("gate_up_bias", (6,), np.dtype("f4"))]
    layout = ExpertLayout(2, 1, [roles])

    turned = layout.with_transposed(["gate_up"])

    role = turned.layers[0][0]
    assert (role.shape, role.array_shape, role.nbytes) == ((6, 8), (8, 6), roles[0].nbytes)
    assert turned.layers[0][1] == roles[1]
    assert turned.with_transposed(["gate_up"]) == turned
    assert layout.layers[0] == tuple(roles)


def test_shapes_tell_what_is_stored_transposed_if_all_layers_are() -> None:
    """Even where one matrix is square; not without gates."""
    turned = [_role("gate_up", 6, 12), _role("down", 6, 6)]
    assert ExpertLayout(2, 1, [turned]).find_transposed() == {"gate_up", "down"}
    for others in ([_role("gate_up", 12, 6), _role("down", 6, 6)], [_role("up", 6, 6)]):
        assert not ExpertLayout(2, 1, [turned, others]).find_transposed()
        assert not ExpertLayout(2, 1, [others]).find_transposed()
    assert not ExpertLayout(0, 0, []).find_transposed()


@pytest.mark.parametrize(
    ("names", "problem"),
    [(["down"], "no layer has a role 'down'"), (["gate_up_bias"], r"float32 \[6\] is no matrix")],
)
def test_only_matrices_can_be_transposed(names: list[str], problem: str) -> None:
    """Not biases, and not what is in a format, whose rows are rows."""
    roles = [Role("gate_up", (8, 6), np.dtype("f4")), Role("gate_up_bias", (6,), np.dtype("f4"))]
    with pytest.raises(ConfigError, match=problem):
        ExpertLayout(2, 1, [roles]).with_transposed(names)
    with pytest.raises(ConfigError, match=r"q8_0 .* is no matrix of numbers"):
        ExpertLayout(2, 1, [[Role("up", (8, 32), format="q8_0")]]).with_transposed(["up"])
