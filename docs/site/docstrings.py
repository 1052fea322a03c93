"""A Griffe extension: the docstrings of compiled modules beside the signatures of their stubs.

The stubs have types and no docstrings, the modules have docstrings and no types.
"""

import importlib
import inspect
import re
from typing import Any

import griffe

_CHOICES = re.compile(r"^(\s*\w[\w, ]* : )\{([^}\n]*)\}", re.MULTILINE)


class CompiledDocstrings(griffe.Extension):
    """Completes what was read from a `.pyi` file with what the compiled module says."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Take the docstring that the object has at run time."""
        if obj.docstring is not None:
            # Griffe shows {"a", "b"} as a broken tuple.
            obj.docstring.value = _CHOICES.sub(r"\1typing.Literal[\2]", obj.docstring.value)
            return
        if obj.is_module or not _is_stub(obj):
            return
        found: Any = importlib.import_module(obj.module.path)
        for name in obj.path.removeprefix(f"{obj.module.path}.").split("."):
            found = getattr(found, name, None)
        # Every constructor has the same one, and a constant has its type's.
        if obj.name == "__new__" or (obj.is_attribute and not inspect.isdatadescriptor(found)):
            return
        if text := inspect.getdoc(found):
            text = _CHOICES.sub(r"\1typing.Literal[\2]", text)
            obj.docstring = griffe.Docstring(text, parent=obj, parser=griffe.Parser.numpy)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Show the parameters of `__new__`, which is how stubs write a compiled constructor."""
        if _is_stub(cls) and "__new__" in cls.members and "__init__" not in cls.members:
            cls.set_member("__init__", cls.members["__new__"])
            cls.del_member("__new__")


def _is_stub(obj: griffe.Object) -> bool:
    return not isinstance(obj.filepath, list) and obj.filepath.suffix == ".pyi"
