"""The identity of a policy: words that another process gives to the same one."""

import functools
import hashlib
import inspect
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

_PLAIN = (type(None), bool, int, float, str, bytes)


def identify(policy: Any) -> str:
    """Return what tells a policy from all others, or "" if nothing does.

    A name identifies itself. A class or function of a module: by its own name and its source, or
    the file it was compiled into; a class by those of its bases, too. A partial: by function and
    arguments, if those are plain values, or classes and functions themselves.
    """
    if isinstance(policy, str):
        return policy
    if isinstance(policy, functools.partial):
        parts = [identify(policy.func), *map(_value, policy.args)]
        named = {name: _value(value) for name, value in sorted(policy.keywords.items())}
        if not all(parts) or not all(named.values()):
            return ""
        arguments = [*parts[1:], *(f"{name}={value}" for name, value in named.items())]
        return f"{parts[0]}({', '.join(arguments)})"
    name = getattr(policy, "__qualname__", "<")
    # A policy made in a function, or bound to an object, depends on more than its source.
    if "<" in name or getattr(policy, "__closure__", None) or _is_bound(policy):
        return ""
    source = _with_bases(policy) if isinstance(policy, type) else _source(policy)
    if source is None:
        return ""
    return f"{policy.__module__}.{name}" + (f"#{_digest(source)}" if source else "")


def _is_bound(policy: Any) -> bool:
    owner = None if isinstance(policy, type) else getattr(policy, "__self__", None)
    return owner is not None and not isinstance(owner, ModuleType)


def _with_bases(policy: type) -> bytes | None:
    """Return a class's source and that of its bases, or None if one depends on more than that."""
    sources = [_source(policy)]
    for base in policy.__mro__[1:]:
        room = base.__module__.partition(".")[0]
        # moecache's version is known, and that of Python does not matter.
        if room in ("builtins", "moecache"):
            continue
        source = None if "<" in base.__qualname__ else _source(base)
        # Some of the standard library is written in C.
        sources.append(b"" if source is None and room in sys.stdlib_module_names else source)
    # Source text has no zero bytes.
    known = [source for source in sources if source is not None]
    return b"\0".join(filter(None, known)) if len(known) == len(sources) else None


def _source(policy: Any) -> bytes | None:
    """Return what changes when the policy does; nothing for moecache's own, which has versions."""
    module = str(policy.__module__)
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    try:
        if not file.endswith(tuple(EXTENSION_SUFFIXES)):
            return inspect.getsource(policy).encode()
        return b"" if module.startswith("moecache.") else Path(file).read_bytes()
    except (OSError, TypeError):
        return None


def _value(value: Any) -> str:
    """Return an argument as text that says all of it, or "" if no text does."""
    # Exactly these types: a subclass may have a state that its repr does not show.
    if type(value) in _PLAIN:
        return repr(value)
    if type(value) in (list, tuple):
        parts = [_value(part) for part in value]
        return f"{type(value).__name__}[{', '.join(parts)}]" if all(parts) else ""
    return identify(value) if callable(value) else ""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
