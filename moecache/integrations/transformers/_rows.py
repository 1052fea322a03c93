"""Whether a prompt's rows have the same bits wherever it is cut."""

from typing import Any

from torch import nn

from moecache import kernels
from moecache.decoding.recipe import Attention, Layer, Recipe
from moecache.integrations.transformers._fast import finds_torch_attention, multiplies_any_rows
from moecache.kernels._page import MOST_WIDTH


def are_rows_apart(model: Any, recipe: Recipe, experts: set[nn.Module]) -> bool:
    """Return whether no row of a prompt depends on how many others go through a layer with it.

    All products and the attention are kernels', and what torch computes besides is the same in its
    vectors and in what these leave over: sums, products and roots in float32, sines, softmax. Its
    silu and its sigmoid are not.

    Parameters
    ----------
    model : PreTrainedModel
    recipe : Recipe
        The model's, as it is now.
    experts : set of Module
        Those whose experts are in slots.
    """
    return (
        kernels.level() != "generic"
        and model.config._attn_implementation == "sdpa"
        and all(map(_is_apart, recipe.layers))
        and all(_computes_apart(m) for m in model.get_decoder().modules() if m not in experts)
    )


def _is_apart(layer: Layer) -> bool:
    attention, router = layer.attention, layer.router
    return (
        isinstance(attention, Attention)
        and attention.window is None
        and attention.sinks is None
        and max(attention.width, attention.value_width) <= MOST_WIDTH
        and layer.forward is None
        and router is not None
        and router.scores in ("softmax", "softmax of the chosen")
        and all(one and one.bias is None for one in (layer.attention_norm, layer.forward_norm))
    )


def _computes_apart(module: nn.Module) -> bool:
    """Return whether a module's own product or attention, if it has one, is a kernel's."""
    if finds_torch_attention(module):
        return False
    weight = module._parameters.get("weight")
    is_product = weight is not None and weight.dim() > 1 and not isinstance(module, nn.Embedding)
    return not is_product or multiplies_any_rows(module)
