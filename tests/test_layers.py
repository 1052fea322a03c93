"""The house has floors: a module imports from lower ones only."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "moecache"

# The eviction policies: each derives from `_policy`, and `_policies` makes them by name.
POLICIES = {"_arc", "_echo_cache", "_fifo", "_lecar", "_lfu", "_lrfu", "_slru", "_stale"}
POLICIES |= {"_tinylfu"}
FLOORS = [
    {"errors", "units", "settings", "layout", "files", "profiles", "interrupts"},
    {"_ids", "_policy", "_python_policy", "_policies", "_profiler", "_route_log", *POLICIES}
    | {"_echo", "_prefault", "_pieces", "_reader", "gate", "mappings", "host_memory", "regions"}
    | {"cuda"},
    {"_cache", "_replay", "_optimum", "sizing", "extents", "residency", "sweep", "prefault"},
    {"stores", "slots", "experts", "_foresight", "predict"},
    {"fetch", "reader_fetch", "loader", "steps", "reading", "headroom", "telemetry", "study"}
    | {
        "load_counts",
        "staging",
        "prefetch",
        "prefetch_modes",
        "prefetch_queue",
        "break_even",
        "switch",
        "warmpin",
        "warm_start",
        "usage",
    },
    {"runtime", "opening", "packing"},
    {"integrations"},
    {"commands"},
    {"cli", "__main__"},
]
# Within a floor, in this order only.
SIDEWAYS = {
    *((name, "_policy") for name in (*POLICIES, "_python_policy", "_policies")),
    *(("_policies", name) for name in POLICIES),
    ("_echo", "_ids"),
    ("_echo", "_policy"),
    ("_echo_cache", "_echo"),
    ("_policies", "_echo"),
    ("_lecar", "_slru"),
    ("_lrfu", "_slru"),
    ("_python_policy", "_ids"),
    ("_reader", "_pieces"),
    ("_route_log", "_ids"),
    ("mappings", "_prefault"),
    ("regions", "_prefault"),
    ("sweep", "extents"),
    ("prefault", "sweep"),
    ("prefault", "residency"),
    ("residency", "extents"),
    ("reader_fetch", "fetch"),
    ("load_counts", "fetch"),
    ("loader", "fetch"),
    ("loader", "load_counts"),
    ("loader", "staging"),
    ("loader", "reader_fetch"),
    ("break_even", "loader"),
    ("prefetch", "break_even"),
    ("prefetch", "fetch"),
    ("prefetch", "loader"),
    ("prefetch", "prefetch_queue"),
    ("prefetch", "switch"),
    ("prefetch", "telemetry"),
    ("prefetch_modes", "loader"),
    ("prefetch_modes", "prefetch"),
    ("prefetch_modes", "switch"),
    ("steps", "fetch"),
    ("steps", "prefetch"),
    ("steps", "loader"),
    ("study", "fetch"),
    ("study", "loader"),
    ("study", "prefetch_modes"),
    ("study", "steps"),
    ("study", "telemetry"),
    ("warm_start", "fetch"),
    ("warm_start", "loader"),
    ("usage", "loader"),
    ("usage", "warm_start"),
    ("opening", "runtime"),
    ("units", "errors"),
    ("settings", "errors"),
    ("settings", "units"),
    ("layout", "errors"),
    ("files", "errors"),
    ("profiles", "errors"),
    ("profiles", "files"),
    ("profiles", "layout"),
    ("__main__", "cli"),
}
SOURCES = sorted(path for pattern in ("*.py", "*.pyx", "*.pxd") for path in PACKAGE.rglob(pattern))


def imports(path: Path) -> list[str]:
    """Return the modules that a source imports, at its top or in a function."""
    if path.suffix == ".py":
        tree = ast.parse(path.read_text())
        found = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} has a relative import"
                found += [f"{node.module}.{alias.name}" for alias in node.names]
        return found
    lines = path.read_text().splitlines()
    matches = [re.match(r"\s*(?:from\s+(\S+)\s+)?c?import\s+(\S+)", line) for line in lines]
    return [match[1] or match[2] for match in matches if match]


def floor_of(module: str) -> int:
    """Return the number of a module's floor."""
    return next(number for number, floor in enumerate(FLOORS) if module in floor)


def test_every_module_has_a_floor() -> None:
    """A new file is put on a floor when it is made."""
    modules = {path.relative_to(PACKAGE).parts[0].split(".")[0] for path in SOURCES}
    assert modules - {"__init__"} == set().union(*FLOORS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    """No import goes up, and none sideways but those listed."""
    here = path.relative_to(PACKAGE).parts[0].split(".")[0]
    if here == "__init__":
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "moecache" or len(parts) < 2 or parts[1] == here:
            continue
        there = parts[1]
        if there == "__version__":
            continue
        allowed = floor_of(there) < floor_of(here) or (here, there) in SIDEWAYS
        assert allowed, f"{here} (floor {floor_of(here)}) imports {there} ({floor_of(there)})"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_optional_packages_stay_in_their_place(path: Path) -> None:
    """torch, transformers and accelerate have one importer; CuPy has none so far."""
    heavy = {name.split(".")[0] for name in imports(path)}
    heavy &= {"torch", "transformers", "accelerate", "huggingface_hub", "cupy"}
    if path.relative_to(PACKAGE).parts[:2] == ("integrations", "transformers"):
        heavy &= {"cupy"}
    assert not heavy


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_commands_import_integrations_in_functions_only(path: Path) -> None:
    """`moecache --help` does not wait for torch."""
    if path.relative_to(PACKAGE).parts[0] in {"commands", "cli.py"}:
        named = [
            node.module
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.ImportFrom)
        ]
        assert not any(str(name).startswith("moecache.integrations") for name in named)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_settings_reads_the_environment(path: Path) -> None:
    """`os.environ` stands in settings.py alone."""
    if path.name != "settings.py":
        assert not re.search(r"\b(environ|getenv)\b", path.read_text())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_command_line_prints(path: Path) -> None:
    """`print(` stands in cli.py alone."""
    if path.name != "cli.py":
        assert not re.search(r"(?<![\w.])print\(", path.read_text())
