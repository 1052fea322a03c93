"""The notebooks run from top to bottom and say what their committed outputs say."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("pandas")
# Also finds the fonts, which a kernel that does it first reports on its standard error.
pytest.importorskip("matplotlib.font_manager")

from notebooks.execute import METADATA, NOTEBOOKS, execute, read

ROOT = NOTEBOOKS.parent
NAMES = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
LARGEST_BYTES = 600 * 1024


def code_cells(notebook: Any) -> list[Any]:
    """Return the cells that have outputs."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook: Any) -> dict[str, list[str]]:
    """Return what each cell printed and displayed, pictures aside, timings left out."""
    return {
        cell.id: [text for output in cell.outputs for text in texts_of(output)]
        for cell in code_cells(notebook)
        if "timing" not in cell.metadata.get("tags", [])
    }


def texts_of(output: Any) -> list[str]:
    """Return an output's texts: of a stream, or in each textual form of what is displayed."""
    if output.output_type == "stream":
        return [f"{output.name}: {output.text}"]
    return [f"{kind}: {output.data[kind]}" for kind in sorted(output.data) if "text/" in kind]


def pictures(notebook: Any) -> list[str]:
    """Return the cells that show a picture, once for each."""
    return [
        cell.id
        for cell in code_cells(notebook)
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]


def test_there_are_notebooks() -> None:
    """The tests below have something to test."""
    assert NAMES == ["hit_rates.ipynb", "policies.ipynb"]


# One from each directory that the notebooks promise to work from.
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "directory"), [("hit_rates.ipynb", ROOT), ("policies.ipynb", NOTEBOOKS)]
)
def test_a_run_gives_the_committed_outputs(name: str, directory: Path) -> None:
    """No cell raises or writes to standard error, and every text is the committed one."""
    committed = read(NOTEBOOKS / name)

    run = execute(NOTEBOOKS / name, directory=directory)

    errors = [
        (cell.id, output.text)
        for cell in code_cells(run)
        for output in cell.outputs
        if output.get("name") == "stderr"
    ]
    assert errors == []
    assert texts(run) == texts(committed)
    assert pictures(run) == pictures(committed)


@pytest.mark.parametrize("name", NAMES)
def test_committed_outputs_are_of_one_run(name: str) -> None:
    """Every code cell was executed, once and in order, and said something or defined something."""
    cells = code_cells(read(NOTEBOOKS / name))

    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    silent = [cell.id for cell in cells if not cell.outputs]
    assert all(cell_id.endswith("class") for cell_id in silent), silent


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_says_nothing_of_the_machine(name: str) -> None:
    """Metadata are the plain ones; no absolute path is in a text; the file stays small."""
    path = NOTEBOOKS / name
    notebook = read(path)

    assert notebook.metadata == METADATA
    assert {key for cell in notebook.cells for key in cell.metadata} <= {"tags"}
    for place in (str(ROOT), str(Path.home()), "/tmp/", "/home/"):
        assert place not in str(texts(notebook))
    assert path.stat().st_size < LARGEST_BYTES
