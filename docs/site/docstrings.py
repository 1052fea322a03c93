"""A Griffe extension: the docstrings of compiled modules beside the signatures of their stubs.

The stubs have the types and no docstrings, the modules have docstrings and no types.
"""

import importlib
import inspect
from typing import Any

import griffe


class CompiledDocstrings(griffe.Extension):
    """Complete what was read from a `.pyi` file with what the module it describes says."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Take the docstring that the object has at run time."""
        if obj.is_module or obj.docstring is not None or obj.filepath.suffix != ".pyi":
            return
        found: Any = importlib.import_module(obj.module.path)
        for name in obj.path.removeprefix(f"{obj.module.path}.").split("."):
            found = getattr(found, name, None)
        # A plain constant has its type's docstring.
        if obj.is_attribute and not inspect.isdatadescriptor(found):
            return
        text = inspect.getdoc(found)
        # What every class inherits from object says nothing about this one.
        if text and text not in {"Initialize self.  See help(type(self)) for accurate signature."}:
            obj.docstring = griffe.Docstring(text, parent=obj)

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Show the parameters of `__new__`, which stubs of compiled classes have, as the class's."""
        if "__new__" in cls.members and "__init__" not in cls.members:
            cls.set_member("__init__", cls.members["__new__"])
