"""The rooms of the house: a room imports only rooms below it, and no room has a circle."""

import ast
import functools
import re
from pathlib import Path

import moecache

PACKAGE = Path(moecache.__file__).parent
# Lowest first. A room is a file or a folder of `moecache/`.
ROOMS = (
    *("errors", "units", "policies", "settings", "interrupts", "files"),
    *("formats", "layout", "kernels"),
    *("cache", "sizing", "prefault", "cuda", "stores", "slots", "traces"),
    *("ranks", "reader", "packing", "loading", "profiles", "prefetch", "telemetry", "runtime"),
    *("compute", "decoding", "study", "integrations", "serving", "commands", "cli", "__main__"),
)
# Compiled modules that stay where they were published.
PLACES = {"_slru": "policies", "_prefault": "prefault"}
HEAVY = {
    *("torch", "transformers", "accelerate", "huggingface_hub", "cupy"),
    *("starlette", "uvicorn", "llguidance", "vllm"),
}


def module_of(path: Path) -> str:
    """Return a source's name below `moecache`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """Return the room that a module is in."""
    first = module.split(".", maxsplit=1)[0]
    return PLACES.get(first, first)


def imports(path: Path) -> list[str]:
    """Return what a source imports, at its top, in a function, or for its types."""
    if path.suffix != ".py":
        lines = path.read_text().splitlines()
        matches = [re.match(r"\s*(?:from\s+(\S+)\s+)?c?import\s+(\S+)", line) for line in lines]
        return [match[1] or match[2] for match in matches if match]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@functools.cache
def sources() -> dict[Path, list[str]]:
    """Return what each source of the package imports."""
    return {
        path: imports(path)
        for pattern in ("*.py", "*.pyx", "*.pxd")
        for path in sorted(PACKAGE.rglob(pattern))
    }


@functools.cache
def modules() -> frozenset[str]:
    """Return the names of the package's modules."""
    return frozenset(module_of(path) for path in sources()) - {""}


def imported_modules(path: Path) -> set[str]:
    """Return the modules of this package that a source imports, the deepest that are named."""
    found = set()
    for name in sources()[path]:
        parts = name.split(".")[1:] if name.split(".")[0] == "moecache" else []
        while parts and ".".join(parts) not in modules():
            parts.pop()
        found.add(".".join(parts))
    return found - {"", module_of(path)}


def test_every_module_is_in_a_room() -> None:
    """A new file is put into one when it is made."""
    assert {room_of(module) for module in modules()} == set(ROOMS)
    assert len(ROOMS) == len(set(ROOMS))
    assert len({path.name for path in PACKAGE.iterdir()} - {"__pycache__"}) <= 41


def test_a_room_imports_only_rooms_below_it() -> None:
    """Without exception."""
    wrong = [
        f"{module_of(path)} imports {there}"
        for path in sources()
        if path.name != "__init__.py" or path.parent != PACKAGE
        for there in sorted(imported_modules(path))
        if ROOMS.index(room_of(there)) > ROOMS.index(room_of(module_of(path)))
    ]
    assert not wrong


def test_no_room_has_a_circle() -> None:
    """Also not by what is imported for types alone."""
    needs: dict[str, set[str]] = {}
    for path in sources():
        here = module_of(path)
        inside = {there for there in imported_modules(path) if room_of(there) == room_of(here)}
        needs.setdefault(here, set()).update(inside)
    while needs:
        free = [module for module, below in needs.items() if not below & needs.keys()]
        assert free, {module: sorted(below & needs.keys()) for module, below in needs.items()}
        for module in free:
            del needs[module]


def test_optional_packages_have_one_importer() -> None:
    """Integrations import torch, `_vllm.py` vLLM, `serving` the server, `cuda/_cupy.py` CuPy."""
    for path, found in sources().items():
        heavy = {name.split(".")[0] for name in found} & HEAVY
        if path.relative_to(PACKAGE).parts[:2] == ("integrations", "transformers"):
            heavy -= {"torch", "transformers", "accelerate", "huggingface_hub"}
        # Its parser of answers, which needs no torch.
        if path == PACKAGE / "integrations" / "answer_parts.py":
            heavy -= {"transformers"}
        if path.relative_to(PACKAGE).parts[:2] == ("integrations", "vllm"):
            heavy -= {"torch"}
        if path == PACKAGE / "integrations" / "vllm" / "_vllm.py":
            heavy -= {"vllm"}
        if path.relative_to(PACKAGE).parts[0] == "integrations" and path.stem.startswith("hub"):
            heavy -= {"huggingface_hub"}
        if path.relative_to(PACKAGE).parts[0] == "serving":
            heavy -= {"starlette", "uvicorn"}
        if path in (PACKAGE / "serving" / "grammars.py", PACKAGE / "serving" / "vocabulary.py"):
            heavy -= {"llguidance"}
        if path.relative_to(PACKAGE).parts == ("cuda", "_cupy.py"):
            heavy -= {"cupy"}
        assert not heavy, path


def test_commands_import_integrations_in_functions_only() -> None:
    """`moecache --help` does not wait for torch, nor for a server."""
    for path in sources():
        if room_of(module_of(path)) in {"commands", "cli"}:
            body = ast.parse(path.read_text()).body
            named = [str(node.module) for node in body if isinstance(node, ast.ImportFrom)]
            slow = ("moecache.integrations", "moecache.serving")
            assert not any(name.startswith(slow) for name in named), path


def test_one_place_reads_the_environment_and_one_prints() -> None:
    """`os.environ` stands in settings/environment.py alone, and `print(` in cli.py."""
    for path in sources():
        text = path.read_text()
        if path != PACKAGE / "settings" / "environment.py":
            assert not re.search(r"\b(environ|getenv)\b", text), path
        if path.name != "cli.py":
            assert not re.search(r"(?<![\w.])print\(", text), path
