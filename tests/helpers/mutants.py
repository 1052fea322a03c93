"""Modules with a piece of their text exchanged: a test of the tests."""

import inspect
import sys
from types import ModuleType
from typing import Any

import pytest


def mutated(
    monkeypatch: pytest.MonkeyPatch, originals: list[ModuleType], old: str, new: str
) -> list[Any]:
    """Return copies of modules; in one of them a piece of text, which is there once, is another."""
    sources = [inspect.getsource(original) for original in originals]
    assert sum(source.count(old) for source in sources) == 1, old
    copies = []
    for original, source in zip(originals, sources, strict=True):
        module = ModuleType(f"{original.__name__}_mutant")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(source.replace(old, new), module.__name__, "exec"), module.__dict__)
        copies.append(module)
    return copies
