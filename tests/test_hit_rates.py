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


def test_without_the_traces_it_says_so(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """And succeeds: they are not the project's to ship."""
    assert hit_rates.main(["--traces", str(tmp_path)]) == 0
    assert "skipped: the traces are not in" in capsys.readouterr().out
