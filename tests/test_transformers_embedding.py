"""Rows of an embedding as a program reads them: the bits that its module makes."""

from typing import Any

import numpy as np
import pytest

from moecache.formats import find_format
from tests.helpers.gguf_files import random_tensor

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

NUM, COLUMNS = 37, 512
KINDS = ("Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ2_XXS")


def rows_of(module: Any, ids: list[int]) -> np.ndarray:
    """Return what a program reads for some tokens."""
    from moecache.integrations.transformers.recipes._embedding import embedding_of
    from moecache.integrations.transformers.recipes._parts import Weights

    out = np.full((len(ids), COLUMNS), np.nan, np.float32)
    embedding_of(module, Weights())(ids, out)
    return out


def check(module: Any, error: str = f"is not one of {NUM}") -> None:
    """Compare with the module's own forward; `error` tells who looked the rows up."""
    ids = [0, NUM - 1, 5, 5, 11]
    wanted = module(torch.tensor(ids)).float().detach().numpy()
    found = rows_of(module, ids)
    assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))
    for wrong in (-1, NUM):
        with pytest.raises(IndexError, match=error):
            rows_of(module, [0, wrong])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_a_format(kind: str, dtype: Any) -> None:
    """Rounded to the model's dtype, as the module rounds them."""
    pytest.importorskip("gguf")
    from moecache.integrations.transformers._native import can_keep, form_of, keep

    raw, _ = random_tensor(np.random.default_rng(3), (NUM, COLUMNS), kind)
    module, known = torch.nn.Embedding(NUM, COLUMNS), find_format(kind.lower())
    assert can_keep(module, known)
    del module.weight
    form = form_of(module, raw, known, (NUM, COLUMNS), lambda n: np.empty(n, np.uint8))
    keep(module, form, kind.lower(), (NUM, COLUMNS), dtype)
    # Its blocks become others before they become a form.
    check(module, *(["out of range in self"] if kind == "IQ2_XXS" else []))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_numbers(dtype: Any) -> None:
    """Without torch."""
    module = torch.nn.Embedding(NUM, COLUMNS, dtype=dtype)
    check(module)


class Doubled(torch.nn.Embedding):  # type: ignore[misc]
    """An embedding of a user's own."""

    def forward(self, given: Any) -> Any:
        """Return rows twice as large."""
        return 2 * super().forward(given)


@torch.no_grad()
def test_another_module_is_called() -> None:
    """A subclass may compute what it likes, half precision and tensors of other classes too."""
    check(Doubled(NUM, COLUMNS), "out of range in self")
    check(torch.nn.Embedding(NUM, COLUMNS, dtype=torch.float16), "out of range in self")
    check(torch.nn.Embedding(NUM, COLUMNS, max_norm=1e3), "out of range")
    module = torch.nn.Embedding(NUM, COLUMNS)
    module.weight = torch.nn.Parameter(torch.randn(COLUMNS, NUM).T)
    check(module, "out of range in self")
    own = type("Own", (torch.Tensor,), {})
    module = torch.nn.Embedding(NUM, COLUMNS)
    module.weight = torch.nn.Parameter(torch.randn(NUM, COLUMNS).as_subclass(own))
    found = rows_of(module, [2, 5])
    assert np.array_equal(found, module.weight.as_subclass(torch.Tensor)[[2, 5]].numpy())


@torch.no_grad()
def test_a_module_of_another_class_by_then_is_called() -> None:
    """As some libraries patch modules in place."""
    from moecache.integrations.transformers.recipes._embedding import embedding_of
    from moecache.integrations.transformers.recipes._parts import Weights

    module = torch.nn.Embedding(NUM, COLUMNS)
    embed = embedding_of(module, Weights())
    out = np.empty((2, COLUMNS), np.float32)
    embed([1, 2], out)
    first = out.copy()
    module.__class__ = Doubled
    embed([1, 2], out)
    assert np.array_equal(out, 2 * first)
