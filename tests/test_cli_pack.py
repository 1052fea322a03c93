"""`moecache pack`: what it writes, shows, verifies and refuses."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moecache import cli, packing
from moecache.stores import open_store
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.packs import tree


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a checkpoint directory."""
    return write_checkpoint(tmp_path / "model", num_layers=2, num_experts=3).path


def test_pack_writes_a_checkpoint_and_says_how_to_use_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes, padding, time, speed, and a line to paste."""
    assert cli.main(["pack", str(model), str(tmp_path / "out")]) == 0

    text = capsys.readouterr().out
    for part in (
        "packed 2 layers x 3 experts: 1.12 KiB in experts, 576 B in trunk",
        "% padding",
        " s (",
        "GiB/s)",
        f"use it: moecache generate {tmp_path / 'out'} 'Why",
        f"or in Python: load('{tmp_path / 'out'}'), moecache.open('{tmp_path / 'out'}')",
    ):
        assert part in text
    with open_store(tmp_path / "out") as store:
        assert store.layout.total_experts == 6


def test_verify_takes_a_packed_directory_alone(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 if every checksum agrees, 1 and the part's name if one does not."""
    out = tmp_path / "out"
    packing.pack(model, out)
    assert cli.main(["pack", "--verify", str(out)]) == 0
    assert "every checksum agrees" in capsys.readouterr().out

    with (out / "trunk.safetensors").open("rb+") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    assert cli.main(["pack", str(out), "--verify"]) == 1
    assert "trunk.safetensors: part 0 differs" in capsys.readouterr().err


def test_verify_with_both_packs_and_verifies(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one call."""
    assert cli.main(["pack", "--verify", str(model), str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert text.index("packed 2 layers") < text.index("every checksum agrees")


def test_dry_run_shows_figures_and_writes_nothing(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 1 if there is too little room."""
    before = tree(tmp_path)
    arguments = ["pack", "--dry-run", str(model), str(tmp_path / "out")]

    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    for part in ("1.12 KiB in 2 layers x 3 experts", "192 B each", "padding", "free are"):
        assert part in text
    monkeypatch.setattr("moecache.packing._place.Place.free_bytes", lambda _: 5000)
    assert cli.main(arguments) == 1
    text = capsys.readouterr().out
    assert "free are 4.88 KiB" in text
    assert "too little room" in text
    assert tree(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_bar_shows_bytes_rate_and_time_on_a_terminal(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And elsewhere nothing but the lines at the end."""
    monkeypatch.setattr("moecache.packing._copy.CHUNK_BYTES", 512)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert cli.main(["pack", str(model), str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "packing" in text
    assert "B/s" in text


def test_links_out_of_the_model_are_shown(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shown before and after: a directory elsewhere may not be meant to be copied."""
    (model / "notes.txt").symlink_to("/etc/passwd")
    (model / "sub").symlink_to("/etc")
    for option in (["--dry-run"], []):
        assert cli.main(["pack", *option, str(model), str(tmp_path / "out")]) == 0
        text = capsys.readouterr().out
        assert "through links out of the checkpoint, to /etc: notes.txt" in text
        assert "left behind, a link to no file: sub -> /etc" in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "moecache pack MODEL OUT; or what to check: moecache pack --verify OUT"),
        (["{model}"], 2, "moecache pack MODEL OUT"),
        (["--verify"], 2, "moecache pack --verify OUT"),
        (["--dry-run", "{model}"], 2, "moecache pack MODEL OUT"),
        (["{model}", "{model}/sub"], 2, "is in the model's own directory"),
        (["{model}", "{tmp}"], 2, "is not empty; remove it"),
        (["{tmp}/nothing", "{tmp}/out"], 1, "no such file or directory"),
        (["--verify", "{model}"], 1, "was not made by moecache pack"),
        (["README.md", "{tmp}/out"], 1, "only .safetensors files"),
    ],
    ids=range(9),
)
def test_errors_are_one_line_with_the_remedy(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    """2 for usage, 1 for failure."""
    monkeypatch.chdir(Path(__file__).parents[1])
    given = [argument.format(model=model, tmp=tmp_path) for argument in arguments]
    assert cli.main(["pack", *given]) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("moecache: ")
    assert message in lines[0]


def test_wrong_usage_shows_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures alone and a check exclude each other."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["pack", "--dry-run", "--verify", "model", "out"])
    assert exit_.value.code == 2
    text = capsys.readouterr().err
    assert "MODEL OUT" in text
    assert "moecache pack --verify OUT" in text


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    """Both forms, and an example of each."""
    with pytest.raises(SystemExit):
        cli.main(["pack", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "[--format FORMAT | --compute-form] [--dry-run | --verify] MODEL OUT moecache pack",
        "moecache pack --verify OUT",
        "moecache pack --compute-form model.gguf ./packed",
        "examples: moecache pack ./Qwen3-30B-A3B",
        "moecache pack --format int4 ./Qwen3-30B-A3B",
        "bf16 dequantizes",
        "OUT.partial",
    ):
        assert part in text


def test_ctrl_c_says_that_the_same_command_goes_on(tiny_moe: Path, tmp_path: Path) -> None:
    """Exit code 130, and it does."""
    slow = (
        "import sys, time\n"
        "from moecache import cli\n"
        "from moecache.packing import _copy\n"
        "fill = _copy._fill\n"
        "def fill_slowly(*arguments):\n"
        "    print('begun', flush=True)\n"
        "    time.sleep(0.01)\n"
        "    fill(*arguments)\n"
        "_copy._fill = fill_slowly\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", slow, "pack", tiny_moe, tmp_path / "out"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)

    assert child.returncode == 130
    assert "the same command goes on with it" in out
    assert err == "moecache: interrupted\n"
    assert cli.main(["pack", str(tiny_moe), str(tmp_path / "out")]) == 0
    packing.verify(tmp_path / "out")
