"""`moecache plan-ranks`: what it shows and writes."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache import cli
from moecache.commands.plan_ranks import _step_work
from moecache.profiles.file import ModelUsage, identity, update_profile
from moecache.ranks import Placement
from moecache.stores import open_store
from moecache.study import Trace, load_any
from moecache.study.statistics import expert_counts
from moecache.units import format_bytes
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.examples import num_examples
from tests.helpers.routing import traces

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "examples" / "traces" / "tiny_moe.npz")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty directory, and work there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cells_of(text: str) -> list[list[str]]:
    """Return the cells of a table's rows."""
    return [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in text.splitlines()
        if line.startswith("│")
    ]


def work_of(placement: Placement, trace: Trace) -> tuple[float, float]:
    """Return the slowest rank's experts for an even share, and the mean's, step by step."""
    slowest, mean = [], []
    for step in np.unique(trace.step):
        for layer in range(trace.num_layers):
            used = np.unique(trace.experts[trace.step == step, layer])
            used = used[used >= 0]
            if len(used):
                ranks = placement.owners[layer, used]
                work = np.bincount(ranks, minlength=placement.num_ranks) / placement.shares
                slowest.append(work.max() / placement.num_ranks)
                mean.append(len(used) / placement.num_ranks)
    return (float(np.mean(slowest)), float(np.mean(mean))) if slowest else (0.0, 0.0)


@settings(max_examples=num_examples(60))
@given(trace=traces(), data=st.data())
def test_the_slowest_rank_of_a_step_is_found(trace: Trace, data: st.DataObject) -> None:
    """Step by step and layer by layer, share by share."""
    num_ranks = data.draw(st.integers(1, trace.num_experts))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shares = 0.2 + rng.random(num_ranks)
    owners = np.stack(
        [rng.permutation(np.arange(trace.num_experts) % num_ranks)] * trace.num_layers
    )
    placement = Placement(owners, num_ranks, shares=shares)

    assert np.allclose(_step_work(placement, trace), work_of(placement, trace))


def test_a_trace_alone_is_enough(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks with their experts, bytes and uses; and the file has that placement."""
    assert cli.main(["plan-ranks", "--trace", TINY, "--ranks", "3", "--memory", "1G,1G,2G"]) == 0
    shown = capsys.readouterr().out

    trace = load_any(TINY)
    placement = Placement.load(place / "placement.json")
    assert placement == Placement.balanced(expert_counts(trace), 3, [1, 1, 2])
    loads = placement.loads(expert_counts(trace)).sum(1)
    for rank, row in enumerate(cells_of(shown)):
        size = ["1.00 GiB", "1.00 GiB", "2.00 GiB"][rank]
        held = [64, 64, 128][rank]
        assert row[:3] == [str(rank), size, str(held)]
        assert row[3] == ["3.00 MiB", "3.00 MiB", "6.00 MiB"][rank]
        assert row[4] == f"{loads[rank] / loads.sum():.2%}"
    slowest, mean = work_of(placement, trace)
    assert f"the slowest computes {slowest:.2f} experts of a layer, the mean rank {mean:.2f}" in (
        " ".join(shown.split())
    )
    assert "on 3 ranks, by their uses in the trace" in shown
    assert "expert_parallel=True, placement='placement.json'" in shown
    assert max(len(line) for line in shown.splitlines() if line.startswith("│")) <= 80


def test_a_model_and_what_a_profile_noted_of_it(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or nothing: then all experts count alike."""
    model = write_checkpoint(place / "model", num_layers=2, num_experts=6).path
    assert cli.main(["plan-ranks", str(model), "--ranks", "2"]) == 0
    shown = capsys.readouterr().out
    assert "2 layers of 6 experts on 2 ranks, all counting alike" in shown
    assert Placement.load(place / "placement.json") == Placement.even(2, 6, 2)
    with open_store(model) as store:
        size = store.layout.total_bytes // 2
        name = identity(store.layout)
    assert [row[2] for row in cells_of(shown)] == [format_bytes(size)] * 2

    counts = np.array([[90, 1, 1, 1, 1, 80], [1, 1, 70, 1, 60, 1]], np.uint64)
    assert cli.main(["plan-ranks", str(model), "--ranks", "2", "--profile", "usage"]) == 2
    assert "has no usage of this model" in capsys.readouterr().err
    usage = ModelUsage("echo", counts, np.zeros(0, np.int32), {})
    update_profile(place / "usage", models={name: usage})
    assert cli.main(["plan-ranks", str(model), "--ranks", "2", "--profile", "usage"]) == 0
    assert "by their uses in the profile" in capsys.readouterr().out
    placement = Placement.load(place / "placement.json")
    assert placement == Placement.balanced(counts, 2)
    assert placement.owners[0, 0] != placement.owners[0, 5]

    other = ModelUsage("echo", np.roll(counts, 2, axis=1), np.zeros(0, np.int32), {})
    update_profile(place / "usage1", models={name: other})
    both = ["--profile", "usage", "--profile", "usage1"]
    assert cli.main(["plan-ranks", str(model), "--ranks", "2", *both]) == 0
    placement = Placement.load(place / "placement.json")
    assert placement == Placement.balanced(counts + other.counts, 2)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--ranks=2"], 2, "give a MODEL, or a --trace"),
        (["--ranks=0", f"--trace={TINY}"], 2, "--ranks: num_ranks must be from 1"),
        (["--ranks=33", f"--trace={TINY}"], 2, "--ranks: 33 ranks are more than the 32 experts"),
        (["--ranks=2", f"--trace={TINY}", "--memory=8G"], 2, "--memory: '8G' has 1 sizes"),
        (["--ranks=2", f"--trace={TINY}", "--memory=8G,0"], 2, "--memory: '8G,0' has a rank"),
        (["--ranks=2", f"--trace={TINY}", "--memory=8G,much"], 2, "--memory: 'much' is not"),
        (["--ranks=2", f"--trace={TINY}", "--memory=1P,1"], 2, "--memory: rank 1 of 2 owns no"),
        (["--ranks=2", f"--trace={TINY}", "--output=no/x"], 2, "--output: there is no directory"),
        (["--ranks=2", "--trace=none.npz"], 1, "none.npz: "),
        (["none", "--ranks=2"], 1, "none: "),
    ],
)
def test_wrong_options_are_named(
    place: Path, options: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing is written."""
    assert cli.main(["plan-ranks", *options]) == code
    assert capsys.readouterr().err.startswith(f"moecache: {message}")
    assert not (place / "placement.json").exists()


def test_a_trace_of_another_model_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As is an output over something else."""
    model = write_checkpoint(place / "model", num_layers=2, num_experts=6).path
    assert cli.main(["plan-ranks", str(model), "--ranks", "2", "--trace", TINY]) == 2
    assert "is of 8 layers of 32 experts, the model has 2 of 6" in capsys.readouterr().err
    (place / "placement.json").write_text("a diary")
    assert cli.main(["plan-ranks", str(model), "--ranks", "2"]) == 2
    assert "would be lost" in capsys.readouterr().err
    assert (place / "placement.json").read_text() == "a diary"
    assert cli.main(["plan-ranks", str(model), "--ranks", "2", "--force"]) == 0
