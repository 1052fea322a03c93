"""A checkpoint that `load` makes a model of is opened once, and closed with the model."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest

import moecache
from moecache.errors import ConfigError
from moecache.stores import open_store
from moecache.stores._file import ReadOnlyFile

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(name="opened")
def _opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return which files of weights are opened, as they are opened."""
    paths: list[Path] = []
    begin = ReadOnlyFile.__init__

    def noted(self: ReadOnlyFile, path: Path) -> None:
        if path.suffix == ".safetensors":
            paths.append(path)
        begin(self, path)

    monkeypatch.setattr(ReadOnlyFile, "__init__", noted)
    return paths


def load(path: Any, **keywords: Any) -> Any:
    """Return the model of a path, or of an open store."""
    from moecache.integrations import transformers

    return transformers.load(path, "50%", prefault="off", **keywords)


def num_descriptors() -> int:
    """Return how many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def test_each_file_is_opened_once(qwen3_moe: Path, opened: list[Path]) -> None:
    """For trunk, plan, slots and reads together."""
    with load(qwen3_moe).moecache:
        assert sorted(opened) == sorted(qwen3_moe.glob("*.safetensors"))


def test_a_store_that_is_open_is_the_models(qwen3_moe: Path, opened: list[Path]) -> None:
    """It is not opened again, and closed with the model."""
    store = open_store(qwen3_moe)
    opened.clear()
    model = load(store)
    assert model.moecache.runtime.store is store
    model.moecache.close()
    assert not opened
    with pytest.raises(moecache.StoreError, match="the store is closed"):
        store.files  # noqa: B018 - a property that raises


@pytest.mark.parametrize("keywords", [{"policy": "best"}, {"slots": 0}, {"loader_threads": -1}])
def test_after_an_error_nothing_is_open(qwen3_moe: Path, keywords: dict[str, Any]) -> None:
    """Neither what was given nor what was opened."""
    before = num_descriptors()
    for given in (qwen3_moe, open_store(qwen3_moe)):
        with pytest.raises(moecache.MoeCacheError):
            load(given, **keywords)
    del given
    assert num_descriptors() == before


def test_open_and_plan_take_an_open_store(qwen3_moe: Path, opened: list[Path]) -> None:
    """A plan leaves it open, a runtime closes it; also where the options are wrong."""
    with open_store(qwen3_moe) as store:
        planned = moecache.plan(store, "50%")
        assert planned.capacity < store.layout.total_experts
        opened.clear()
        moecache.open(store, "50%").close()
        assert not opened
    with open_store(qwen3_moe) as store:
        with pytest.raises(ConfigError, match="there is no layer 'none' with experts"):
            moecache.open(store, layers=["none"])
        with pytest.raises(moecache.StoreError, match="is closed"):
            store.files  # noqa: B018 - a property that raises


def test_options_are_one_object_or_keywords(qwen3_moe: Path) -> None:
    """Not both; what is no option is told, with what was meant."""
    options = moecache.Options(memory="50%", policy="lru")
    assert moecache.plan(qwen3_moe, options=options).policy == "lru"
    with pytest.raises(ConfigError, match="either options or keywords"):
        moecache.plan(qwen3_moe, "50%", options=options)
    with pytest.raises(TypeError, match="no option 'slot'; did you mean 'slots'"):
        moecache.open(qwen3_moe, slot=3)


def test_the_source_in_a_configuration_is_not_copied(qwen3_moe: Path) -> None:
    """Transformers copies configurations; an open file cannot be."""
    from moecache.integrations.transformers import MoeCacheConfig
    from moecache.integrations.transformers._source import Source

    with Source(qwen3_moe) as source:
        source.open()
        known = MoeCacheConfig(source=source)
        assert copy.deepcopy(known).source is source
        assert known.to_dict() == {"quant_method": "moecache", "trunk": "bf16"}
