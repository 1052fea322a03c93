"""README.md and docs: their examples run, and what they print is what they show."""

import contextlib
import importlib.util
import io
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import moecache
from moecache import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# An optional comment, then a fenced block.
BLOCK = re.compile(
    r"^(?:<!-- (?P<why>not run|needs): (?P<what>.+?) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
# What is shown besides: the shell's other commands are not this project's.
OTHER_COMMANDS = {"make", "pip"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `shown` is the text block that follows it."""

    kind: str
    text: str
    why: str | None
    what: str | None
    shown: str | None


def _blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = list(BLOCK.finditer(text))
    blocks = []
    for match, following in itertools.zip_longest(found, found[1:]):
        shown = None
        if following is not None and following["kind"] == "text":
            between = text[match.end() : following.start()]
            shown = None if between.strip() else following["text"]
        blocks.append(Block(match["kind"], match["text"], match["why"], match["what"], shown))
    return blocks


RUNNING = [page for page in PAGES if {b.kind for b in _blocks(page)} & {"python", "sh", "console"}]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty directory with the examples in it, and work there."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    if importlib.util.find_spec("matplotlib"):
        monkeypatch.setenv("MPLBACKEND", "agg")
    return tmp_path


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run_in_their_order(page: Path, place: Path) -> None:
    """In one namespace, as a reader types them, and they print what is shown."""
    names: dict[str, object] = {}
    try:
        for block in _blocks(page):
            if block.why == "not run":
                continue
            if block.why == "needs" and not importlib.util.find_spec(str(block.what)):
                continue
            if block.kind == "python":
                code = compile(block.text, str(page), "exec")
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    exec(code, names)
                if block.shown is not None:
                    _compare(printed.getvalue(), block.shown)
            elif block.kind == "sh":
                for command in block.text.splitlines():
                    if words := shlex.split(command, comments=True):
                        _run(words)
            elif block.kind == "console":
                for command, shown in _commands(block.text):
                    _compare(_run(shlex.split(command)), shown)
    finally:
        for value in names.values():
            if isinstance(value, moecache.ExpertRuntime):
                value.close()
        if "plots" in names:
            from matplotlib import pyplot as plt

            plt.close("all")


def test_few_examples_cannot_run() -> None:
    """Those that need a GPU, a big model, a port, or a host that the page does not have."""
    blocks = [block for page in RUNNING for block in _blocks(page)]
    examples = [block for block in blocks if block.kind in {"python", "sh", "console"}]
    left_out = [block for block in examples if block.why == "not run"]

    assert len(examples) > 3 * len(left_out), [block.what for block in left_out]


def test_the_messages_on_the_page_of_errors_are_those_of_the_code() -> None:
    """Whatever stands for a figure or a name, each is a text in the sources."""
    files = [*(ROOT / "moecache").rglob("*.py"), *(ROOT / "moecache").rglob("*.pyx")]
    texts = "\n".join(path.read_text() for path in files)
    literal = r'f?"(?:[^"\\\n]|\\.)*"|f?\'(?:[^\'\\\n]|\\.)*\''
    patterns = [
        "".join(_pattern(part) for part in re.findall(literal, run))
        for run in set(re.findall(rf"(?:(?:{literal})(?:\s|\+ )*)+", texts))
    ]
    # Two words and a name fit anything.
    telling = [re.compile(p) for p in patterns if len(re.sub(r"\\|\.\+", "", p)) >= 16]
    messages = re.findall(r"^> (.+)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)

    assert len(messages) > 20
    assert not [text for text in messages if not any(p.fullmatch(text) for p in telling)]


def test_every_public_name_is_in_the_reference() -> None:
    """A name that is not there would have no page."""
    text = "".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
    documented = set(re.findall(r"^::: moecache\.(\w+)", text, re.MULTILINE))

    # Of these modules what they have stands there.
    assert set(moecache.__all__) - {"errors", "experts"} <= documented


def test_readme_fits_on_a_few_screens() -> None:
    """All else has a page of its own."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 115


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """To a file of the project."""
    targets = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).is_file()]


def _run(words: list[str]) -> str:
    """Run a command of this project here; return what it prints."""
    if words[0] in OTHER_COMMANDS:
        return ""
    assert words[0] == "moecache", words
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        code = cli.main(words[1:])
    # A message is the last line of what failed.
    assert code == 0 or printed.getvalue().splitlines()[-1].startswith("moecache: "), words
    return printed.getvalue()


def _commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console, and what it shows."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def _compare(printed: str, shown: str) -> None:
    """Compare but for figures, their units, and the widths they take; "..." is any text."""
    if not shown:
        return
    parts = [re.escape(_plain(part)) for part in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)]
    matches = re.fullmatch(".*".join(parts), _plain(printed), re.DOTALL)
    assert matches, f"{printed}\n--- is not\n{shown}"


def _plain(text: str) -> str:
    text = re.sub(r"\d[\d.,]*(?: ([KMGT]i?B|B|ns|us|ms|s)\b)?", "0", text)
    return re.sub(r"\s+", "", re.sub(r"[█▓▒░·─━]+", "─", text))


def _pattern(literal: str) -> str:
    """Return a pattern for what a string literal of the sources can become."""
    inner = literal.lstrip("f")[1:-1].replace('\\"', '"').replace("\\'", "'")
    if literal[0] != "f":
        return re.escape(inner)
    return ".+".join(map(re.escape, re.split(r"\{[^{}]*\}", inner)))


def test_the_list_of_decisions_has_all_of_them() -> None:
    """In their order, each by its title."""
    folder = ROOT / "docs" / "decisions"
    pages = sorted(folder.glob("[0-9]*.md"))
    titles = [page.read_text().splitlines()[0].lstrip("# ") for page in pages]
    rows = re.findall(
        r"^\| (\d+) \| \[(.+)\]\((.+)\) \|$", (folder / "README.md").read_text(), re.MULTILINE
    )
    assert [(int(number), page) for number, _, page in rows] == [
        (at, page.name) for at, page in enumerate(pages, 1)
    ]
    assert [title for _, title, _ in rows] == [
        title.partition(". ")[2] or title for title in titles
    ]
