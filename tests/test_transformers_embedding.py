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


def check(module: Any) -> None:
    """Compare with the module's own forward."""
    ids = [0, NUM - 1, 5, 5, 11]
    wanted = module(torch.tensor(ids)).float().detach().numpy()
    found = rows_of(module, ids)
    assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))
    for wrong in (-1, NUM):
        with pytest.raises(IndexError, match=f"token {wrong} is not one of {NUM}|out of range"):
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
    check(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_numbers(dtype: Any) -> None:
    """Without torch."""
    module = torch.nn.Embedding(NUM, COLUMNS, dtype=dtype)
    check(module)


def test_another_module_is_called() -> None:
    """A subclass may compute what it likes."""

    class Doubled(torch.nn.Embedding):  # type: ignore[misc]
        def forward(self, given: Any) -> Any:
            return 2 * super().forward(given)

    module = Doubled(NUM, COLUMNS)
    ids = [3, 8]
    wanted = module(torch.tensor(ids)).detach().numpy()
    with torch.no_grad():
        assert np.array_equal(rows_of(module, ids), wanted)
