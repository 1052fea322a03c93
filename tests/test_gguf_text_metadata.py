"""Metadata of GGUF files that no converter writes: read all the same, or refused."""

from pathlib import Path
from typing import Any

import pytest

from moecache.decoding.files.recipes import FileModel
from moecache.errors import ConfigError
from moecache.stores import GgufStore, open_store
from tests.helpers.gguf_models import write_gguf
from tests.helpers.gguf_texts import parts_of

pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

NUMBERS = (-1, 0, 1, 2, 7, 10**9, 2**63, -0.5, 0.5, 1e-40, 3e38, float("nan"), float("inf"))
OTHERS = (None, True, "", "yarn", [], [1], [True, False], [0.5] * 5, [-1] * 5, [2**40] * 5)


@pytest.mark.parametrize("name", ["exaone-moe", "afmoe", "phimoe", "llama4"])
def test_metadata_are_read_or_refused(tmp_path: Path, name: str) -> None:
    """Whatever stands there: a value is used, or the error names what is wrong."""
    _, metadata, tensors = parts_of(name)
    write_gguf(tmp_path / "m.gguf", metadata, tensors)
    with open_store(tmp_path / "m.gguf") as store:
        assert isinstance(store, GgufStore)
        whole = dict(store.metadata)
        prefix = f"{metadata['general.architecture']}."
        num_refused = 0
        for key in [key for key in whole if key.startswith(prefix)]:
            for value in (*NUMBERS, *OTHERS):
                changed: Any = {**whole, key: value}
                if value is None:
                    del changed[key]
                store.metadata = changed
                try:
                    FileModel(store)
                except ConfigError:
                    num_refused += 1
        assert num_refused > 100
