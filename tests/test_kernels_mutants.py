"""Each row of the kernels' tables, and each case of their switches, is tested in C."""

import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEADERS, TESTS = ROOT / "moecache" / "kernels", ROOT / "tests" / "kernels_c"
pytestmark = pytest.mark.nightly
Outcome = tuple[int, str]
# Of the codes' columns in `MC_CODES`, what a row's other value would be.
OTHER_BITS = {"8": "4", "4": "8", "5": "6", "6": "5"}
OTHER_KINDS = {"0": "1", "1": "0", "2": "0"}


def rows_of(text: str, macro: str) -> Iterator[tuple[str, list[str]]]:
    """Return each X(...) of a list, and its arguments."""
    start = text.index(f"#define {macro}(X)")
    body = re.match(r"(?:.*\\\n)*.*\n", text[start:])
    assert body is not None
    for row in re.finditer(r"X\(([^()]*)\)", body[0].partition("\n")[2]):
        yield row[0], [argument.strip() for argument in row[1].split(",")]


def mutants() -> Iterator[tuple[str, str, str]]:
    """Return (header, what stands there once, what stands there instead)."""
    matrix, blocks = ((HEADERS / name).read_text() for name in ("_matrix.h", "_blocks.h"))
    for row, (name, text, bits, bias, kind, unit) in rows_of(matrix, "MC_CODES"):
        changed = [(OTHER_BITS[bits], bias, kind, unit), (bits, bias, OTHER_KINDS[kind], unit)]
        if kind == "1" and bits != "8":
            changed.append((bits, str(int(bias) + 1), kind, unit))
        if kind != "0":
            changed.append((bits, bias, kind, f"{2 * float(unit[:-1])}f"))
        for fields in changed:
            yield "_matrix.h", row, f"X({', '.join((name, text, *fields))})"
    for row, (name, *entries) in rows_of(matrix, "MC_TABLES"):
        used = 6 if name in ("IQ1", "IQ2") else len(entries)
        for place in (0, used // 2, used - 1):
            other = [*entries]
            other[place] = str(int(other[place]) + 1)
            yield "_matrix.h", row, f"X({', '.join((name, *other))})"
    for row, _ in rows_of(matrix, "MC_FORMS"):
        yield "_matrix.h", row, ""
    for row, (name, text, how) in rows_of(matrix, "MC_ORDERS"):
        other_way = "form_of" if how != "form_of" else "form_words"
        yield "_matrix.h", row, f"X({name}, {text}, {other_way})"
    for case in re.finditer(r"    case MC_\w+: return .*;\n", blocks):
        for number in re.finditer(r"(?<= )\d+", case[0]):
            whole, at = case[0], number.span()
            yield "_blocks.h", whole, f"{whole[: at[0]]}{int(number[0]) + 1}{whole[at[1] :]}"


def build(folder: Path, header: str = "", old: str = "", new: str = "") -> Outcome:
    """Compile the tests in C with a header changed, and run them; return the exit code and lines.

    At the first level alone, which compiles in a second: what is changed is common to all.
    """
    headers, program = folder / "headers", folder / "program"
    shutil.copytree(HEADERS, headers, ignore=lambda _, names: [n for n in names if n[-2:] != ".h"])
    replace(headers / "_levels.h", "#if defined(__x86_64__) && defined(__GNUC__)", "#if 0")
    if header:
        replace(headers / header, old, new)
    command = [*(sysconfig.get_config_var("CC") or "cc").split(), "-O0", "-w"]
    command += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", f"-I{headers}"]
    command += [str(TESTS / "test_kernels.c"), *map(str, sorted((HEADERS / "levels").glob("*.c")))]
    command += ["-o", str(program), "-pthread", "-lm"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        return made.returncode, made.stderr
    try:
        found = subprocess.run([program], capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return 1, ""
    return found.returncode, found.stdout


def replace(path: Path, old: str, new: str) -> None:
    """Change what stands once in a file."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@pytest.fixture(name="whole", scope="module")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Return what the tests print with the headers as they are."""
    found = build(tmp_path_factory.mktemp("whole"))
    assert found[0] == 0, found[1]
    return found


@pytest.mark.parametrize(
    ("header", "old", "new"),
    [pytest.param(*one, id=f"{number}") for number, one in enumerate(mutants())],
)
def test_a_mutant_is_noticed(
    header: str, old: str, new: str, whole: Outcome, tmp_path: Path
) -> None:
    """By the compiler, a test that fails, or another checksum."""
    assert build(tmp_path, header, old, new) != whole
