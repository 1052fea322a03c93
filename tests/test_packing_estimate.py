"""What a GGUF in compute form would cost and save: said before it is packed, where it pays."""

import dataclasses
from pathlib import Path

import pytest

from moecache import cli, packing
from moecache.packing import FormEstimate, estimate_form
from moecache.stores import open_store
from tests.helpers.gguf_files import WIDE, write_gguf

pytest.importorskip("gguf")

LAYERS = [("Q4_K", "Q4_K", "Q6_K"), ("Q4_K", "Q4_K", "Q4_K"), ("IQ3_S", "IQ3_S", "Q8_0")]
PAYS = FormEstimate(
    nbytes=2**30,
    seconds=125,
    is_written=False,
    miss_s=0.0046,
    packed_miss_s=0.0013,
    miss_bytes=2**21,
    packed_miss_bytes=2**22,
)


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", LAYERS, **WIDE).path


def test_bytes_are_those_that_are_packed_and_seconds_are_measured(
    model: Path, tmp_path: Path
) -> None:
    """With a directory the writing counts, and leaves nothing there."""
    with open_store(model) as store:
        found, written = estimate_form(store), estimate_form(store, tmp_path)
        before = store.layout
    assert found is not None
    assert written is not None
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    assert (found.is_written, written.is_written) == (False, True)
    assert found.packed_miss_s > 0
    assert 0 < found.miss_s <= found.seconds
    plan = packing.plan(model, tmp_path / "out", compute_form=True)
    assert found.nbytes == plan.expert_bytes + plan.trunk_bytes
    packing.pack(model, tmp_path / "out", compute_form=True)
    with open_store(tmp_path / "out") as store:
        number = before.total_experts
        assert found.miss_bytes == before.total_bytes / number
        assert found.packed_miss_bytes == store.layout.total_bytes / number
        # There is nothing left to be packed.
        assert estimate_form(store) is None


def test_what_cannot_be_brought_into_compute_form_has_no_estimate(
    tiny_moe: Path, tmp_path: Path
) -> None:
    """Safetensors have --format; plain numbers stay as they are; a model may be dense."""
    for path in (
        tiny_moe,
        write_gguf(tmp_path / "a.gguf", [("BF16", "BF16", "F16")]).path,
        write_gguf(tmp_path / "b.gguf", []).path,
    ):
        with open_store(path) as store:
            assert estimate_form(store) is None


def test_it_pays_where_a_miss_is_a_quarter_shorter() -> None:
    """Two bits become four: on a slow disk the longer read takes what the conversion saves."""
    assert PAYS.pays
    assert not dataclasses.replace(PAYS, packed_miss_s=0.0035).pays
    assert PAYS.describe() == (
        "1.00 GiB, at least 2 min; a miss then takes 1.3 ms instead of 4.6 (reads 4.00 MiB instead "
        "of 2.00 MiB, and converts nothing)"
    )
    assert "about 7 s;" in dataclasses.replace(PAYS, seconds=7, is_written=True).describe()


def test_commands_suggest_it_where_it_pays(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`inspect` if not all experts fit; `pack` says it before it begins, and --dry-run does not."""
    estimate = PAYS
    directories = []

    def measured(_: object, directory: Path | None = None) -> FormEstimate:
        directories.append(directory)
        return estimate

    monkeypatch.setattr(packing, "estimate_form", measured)

    def said(*arguments: str) -> str:
        assert cli.main([*arguments]) == 0
        return capsys.readouterr().out

    shown = said("inspect", str(model), "--memory", "50%")
    assert f"pack it: moecache pack --compute-form {model} OUT writes 1.00 GiB, at least" in shown
    assert "pack it" not in said("inspect", str(model), "--memory", "100%")
    out = str(tmp_path / "out")
    assert "with --compute-form: 1.00 GiB" in said("pack", "--dry-run", str(model), out)
    assert directories == [None, None]
    assert said("pack", "--compute-form", str(model), out).startswith("writes 1.00 GiB")
    assert directories[-1] == tmp_path
    estimate = dataclasses.replace(PAYS, packed_miss_s=1.0)
    assert "pack it" not in said("inspect", str(model), "--memory", "50%")
    assert "compute-form" not in said("pack", str(model), str(tmp_path / "plain"))


def test_a_directory_that_is_not_there_is_an_error_of_the_packing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of what is measured before it."""
    taken = tmp_path / "taken"
    taken.write_text("x")
    assert cli.main(["pack", "--compute-form", str(model), str(taken)]) == 2
    with open_store(model) as store:
        found = estimate_form(store, tmp_path / "nowhere")
    assert found is not None
    assert not found.is_written
    assert "writes" not in capsys.readouterr().out
