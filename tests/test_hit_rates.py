"""The published hit rates come out, and the benchmark that shows them says when they do not."""

import pytest

from bench import hit_rates


def test_the_published_figures_are_reached(capsys: pytest.CaptureFixture[str]) -> None:
    """Every row that was published, the recall, and gpt-oss-120b's eight figures."""
    if not (hit_rates.TRACES / "nvmoe-olmoe.npz").is_file():
        pytest.skip(f"no traces in {hit_rates.TRACES}")

    code = hit_rates.main(["--policy", "lru,lfu,slru,lfru,haz2,echo,belady"])

    shown = capsys.readouterr().out
    assert "missed" not in shown
    assert code == 0
    assert "0.4728" in shown  # ECHO on OLMoE at an eighth


def test_a_figure_that_is_missed_is_named() -> None:
    """By policy, trace and capacity, with both figures."""
    rates = [[0.5] * 3 for _ in hit_rates.NAMES]

    missed = hit_rates.compare("echo", rates)

    assert len(missed) == 12
    assert "echo, nvmoe-olmoe at 12.5%: 0.5000, not 0.473" in missed


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([0.5, 0.49, 0.6, -0.1], "0.4900 is below LRU, 0.5000"),
        ([0.5, 0.51, 0.6, 0.1], "0.10 of the gap, not 0.2"),
        ([0.5, 0.61, 0.6, 1.1], "0.6100 is above the optimum, 0.6000"),
    ],
)
def test_a_batch_that_falls_short_is_named(found: list[float], message: str) -> None:
    """Below LRU, of too small a share, or better than can be."""
    (missed,) = hit_rates.compare_batch(4, "bigmoe-gemma", found)

    assert missed == f"batch of 4, bigmoe-gemma: {message}"
    assert hit_rates.compare_batch(4, "bigmoe-gemma", [0.5, 0.55, 0.6, 0.5]) == []


def test_without_the_traces_it_says_so(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """And succeeds: they are not the project's to ship."""
    assert hit_rates.main(["--traces", str(tmp_path)]) == 0
    assert "skipped: the traces are not in" in capsys.readouterr().out
