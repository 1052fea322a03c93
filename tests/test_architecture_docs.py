"""What docs/architecture.md names is there."""

import re
from pathlib import Path

from tests.test_layers import ROOMS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moecache"
TEXT = (ROOT / "docs" / "architecture.md").read_text()
ENDINGS = (".py", ".pyx", ".pxd", ".h", ".c", ".cu")
SOURCES = {path: path.read_text() for path in PACKAGE.rglob("*") if path.suffix in ENDINGS}
WORDS = {path: set(re.findall(r"\w+", text)) for path, text in SOURCES.items()}
# Modules, packages and classes: what has attributes.
OWNERS = {
    path: {*path.relative_to(ROOT).with_suffix("").parts, *re.findall(r"\bclass (\w+)", text)}
    for path, text in SOURCES.items()
}
CODE = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)))
FILES = {name for name in CODE if re.fullmatch(r"[\w/.]+(/\w*|\w\.(py|pyx|h|cu))", name)}


def is_in_the_code(name: str) -> bool:
    """Return whether `Reader.submit(deferred=True)`, `profile=` or `slots` is there."""
    *owners, last = re.split(r"[(=]", name)[0].split(".")
    found = {path for path in SOURCES if all(owner in OWNERS[path] for owner in owners)}
    return any(last in WORDS[path] | OWNERS[path] for path in found)


def test_every_file_is_there() -> None:
    """In the project, the package or the kernels' directory."""
    roots = (ROOT, PACKAGE, PACKAGE / "cuda")
    assert [name for name in FILES if not any((root / name).exists() for root in roots)] == []


def test_every_name_is_in_the_code() -> None:
    """An attribute in the sources of what it is an attribute of."""
    names = [name for name in CODE - FILES if re.fullmatch(r"(\w+\.)*\w+(\(.*\)|=.*)?", name)]
    assert len(names) > 150
    assert [name for name in names if not is_in_the_code(name)] == []


def test_every_room_is_in_the_table() -> None:
    """As in the test of what they import, in the same order."""
    table = TEXT.partition("## The rooms")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert [room for row in rows for room in re.findall(r"`(\w+)`", row)] == list(ROOMS)
