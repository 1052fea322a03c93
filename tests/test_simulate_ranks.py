"""Simulated time on several machines: one rank is one machine, and times reckoned by hand."""

import csv
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache import cli
from moecache.errors import CapacityError, ConfigError, MoeCacheError
from moecache.ranks import Placement
from moecache.study import Network, RanksTiming, Trace, simulate_ranks, simulate_time
from moecache.study._machine import PREFETCH_MODES
from moecache.study.network import NETWORKS
from moecache.study.ranks import pair_ranks
from tests.helpers.examples import num_examples
from tests.helpers.routing import random_trace, traces

LATENCY_NS, COMPUTE_NS = 100, 1000
NBYTES = 300  # a byte takes a nanosecond
SLOW = Network("slow", 1e9, 500, 200)
MACHINE: dict[str, object] = {
    "bandwidth": 10**9,
    "latency_ns": LATENCY_NS,
    "compute_ns": COMPUTE_NS,
    "expert_bytes": NBYTES,
}


def simulate(trace: Trace, num_ranks: int, **options: object) -> RanksTiming:
    """Return the timing of a trace on devices of a byte per nanosecond, with rows of 50 bytes."""
    given = {**MACHINE, "network": SLOW, "row_bytes": 50, **options}
    return simulate_ranks(trace, num_ranks, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefetch", PREFETCH_MODES)
@settings(max_examples=num_examples(15))
@given(trace=traces(), share=st.floats(0.05, 1))
def test_one_rank_is_one_machine(prefetch: str, trace: Trace, share: float) -> None:
    """To the nanosecond: nothing is sent."""
    capacity = max(1, int(share * trace.num_layers * trace.num_experts))
    found = simulate(trace, 1, capacity=capacity, prefetch=prefetch)
    alone = simulate_time(trace, prefetch=prefetch, capacity=capacity, **MACHINE)  # type: ignore[arg-type]

    assert found.ranks == (alone,)
    assert (found.network_ns, found.waited_ns, found.network_bytes) == (0, (0,), 0)
    assert found.tokens_per_s == alone.tokens_per_s


@settings(max_examples=num_examples(40))
@given(trace=traces(), data=st.data())
def test_the_time_of_every_rank_is_accounted_for(trace: Trace, data: st.DataObject) -> None:
    """Computing, reads, slower ranks, the network; and every pair is of its owner."""
    num_ranks = data.draw(st.integers(1, trace.num_experts))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    placement = Placement.balanced(rng.random((trace.num_layers, trace.num_experts)), num_ranks)
    mode = data.draw(st.sampled_from(PREFETCH_MODES))

    found = simulate(trace, num_ranks, placement=placement, prefetch=mode, capacity="100%")

    ranks = pair_ranks(trace, placement)
    assert ((ranks >= 0) == (trace.experts >= 0)).all()
    for token, layer, place in np.argwhere(ranks >= 0):
        rank, expert = ranks[token, layer, place], trace.experts[token, layer, place]
        assert placement.owners[layer, expert] == rank
    for one, waited in zip(found.ranks, found.waited_ns, strict=True):
        assert one.total_ns == found.total_ns
        assert one.total_ns == one.compute_ns + one.stall_ns + found.network_ns + waited
        assert min(one.compute_ns, one.stall_ns, waited) >= 0
    assert sum(min(found.waited_ns) == waited for waited in found.waited_ns) >= 1
    together = simulate_time(trace, prefetch="off", capacity="100%", **MACHINE)  # type: ignore[arg-type]
    accesses = sum(one.num_hits + one.num_misses for one in found.ranks)
    assert accesses == together.num_hits + together.num_misses


def test_two_ranks_take_half_of_the_experts_time_and_send_their_rows() -> None:
    """All is resident after the first token: then only compute and network are left.

    Four experts of each layer are used, two of each rank. A later layer takes 500 ns of the
    rest, 250 ns of experts (half of 500), and 700 + 16 + 2 x 50 ns to send two rows. Before each
    token 724 ns pass until the ranks agree.
    """
    trace = Trace(np.tile(np.arange(4), (5, 3, 1)), num_experts=4)

    found = simulate(trace, 2, capacity="100%")

    first = 500 + 250 + LATENCY_NS + 2 * NBYTES - 125 + 816
    # Of the first token's experts one is computed while the other one is read.
    first += max(0, 125 - NBYTES)
    assert found.network_ns == 15 * 816 + 5 * 724
    assert found.network_bytes == 2 * (15 * 116 + 5 * 24)
    assert found.total_ns == 12 * (500 + 250 + 816) + 3 * first + 5 * 724
    assert found.waited_ns == (0, 0)
    assert found.ranks[0].num_misses == found.ranks[1].num_misses == 6


def test_all_wait_for_the_slowest_rank() -> None:
    """One whose machine computes at a third of the speed, or that has all the work."""
    trace = Trace(np.tile(np.arange(4), (5, 3, 1)), num_experts=4)
    alike = simulate(trace, 2, capacity="100%")
    found = simulate(trace, 2, capacity="100%", compute_ns=[COMPUTE_NS, 3 * COMPUTE_NS])
    assert found.waited_ns[0] > 10 * COMPUTE_NS > found.waited_ns[1] == 0
    assert found.total_ns > alike.total_ns + 10 * COMPUTE_NS

    lopsided = Placement([[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]], 2)
    found = simulate(trace, 2, capacity="100%", placement=lopsided)
    assert found.ranks[1].num_misses == 1
    assert found.waited_ns[1] > found.waited_ns[0] == 0
    # Four rows in two of three layers, three and one in the last; headers; what is compared.
    assert found.network_bytes == 5 * (3 * (200 + 2 * 16) + 2 * 24)
    assert found.network_ns == 5 * (2 * (700 + 216) + (700 + 166) + 724)


def test_a_layer_without_experts_sends_nothing() -> None:
    """Such as one whose tokens' choices are all padding."""
    experts = np.full((4, 2, 1), -1)
    experts[:, 1] = 0
    found = simulate(Trace(experts, num_experts=2), 2, capacity="100%")
    assert found.network_ns == 4 * (700 + 66 + 724)


def test_two_machines_hold_twice_as_much() -> None:
    """The hit rate is that of a cache of both, or better, and less is read."""
    trace = random_trace(shape=(300, 4, 3), n=24)
    one = simulate(trace, 1, capacity="25%")
    two = simulate(trace, 2, capacity="25%")
    assert two.hit_rate > one.hit_rate + 0.1
    assert two.num_bytes_read < one.num_bytes_read
    assert two.figures()["ranks"][1]["capacity"] == 24
    assert json.loads(json.dumps(two.figures(), allow_nan=False))["num_ranks"] == 2
    assert "rank 1    24 slots" in two.describe()
    assert repr(two).startswith("<RanksTiming of 2 ranks on slow:")


def test_513_experts_and_a_slot_for_each_rank() -> None:
    """Numbers that nothing divides; and steps of several rows."""
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((12, 2, 513)), axis=2)[:, :, :3]
    trace = Trace(experts, num_experts=513, step=np.arange(12) // 3)
    found = simulate(trace, 4, capacity=1)
    assert [one.capacity for one in found.ranks] == [1] * 4
    assert sum(one.num_hits + one.num_misses for one in found.ranks) == sum(
        len(np.unique(experts[3 * i : 3 * i + 3, layer])) for i in range(4) for layer in range(2)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 25}, "25 ranks are more than the 24 experts .* at most 24 ranks"),
        ({"num_ranks": 0}, "num_ranks must be from 1"),
        ({"placement": Placement.even(4, 24, 3)}, "on 3 ranks, and the trace .* on 2; make one"),
        ({"placement": Placement.even(3, 24, 2)}, "of 3 x 24 experts on 2"),
        ({"network": "token ring"}, "network 'token ring' is neither one of 1GbE"),
        ({"row_bytes": 0}, "row_bytes must be from 1"),
        ({"row_bytes": "wide"}, "row_bytes: 'wide' is not a size"),
        ({"bandwidth": [1, 2, 3]}, "bandwidth has 3 entries, for 2 ranks"),
        ({"capacity": [5, 0]}, "is 0 slots"),
        ({"policy": "psychic"}, "policy 'psychic' is not one of"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, object], message: str) -> None:
    """With what they may be."""
    trace = random_trace(shape=(3, 4, 3))
    with pytest.raises((ConfigError, CapacityError), match=message):
        simulate(trace, **{"num_ranks": 2, **options})  # type: ignore[arg-type]


def test_a_network_has_a_name_or_figures() -> None:
    """What TCP leaves of Ethernet; or what is given."""
    ten = Network.parse("10gbe")
    assert (ten.name, ten.latency_ns) == ("10GbE", 30_000)
    assert math.isclose(ten.bandwidth, 1.25e9 * 1448 / 1538)
    assert Network.parse(" 40Gbit/s:5us") == Network("40Gbit/s:5us", 5e9, 5000, 10_000)
    assert Network.parse("40G:5us:1us") == Network("40G:5us:1us", 5e9, 5000, 1000)
    assert Network.parse("0.5G") == Network("0.5G", 62.5e6, 60_000, 10_000)
    assert Network.parse("12Gbps").latency_ns == 30_000
    careful = Network.parse("1.18GB/s:500us")
    assert (careful.bandwidth, careful.latency_ns) == (1.18e9, 500_000)
    assert Network.parse("120 MB/s") == Network("120 MB/s", "120MB/s", "60us")  # type: ignore[arg-type]
    assert Network.parse(ten) is ten
    latencies = [Network.parse(name).latency_ns for name in NETWORKS]
    assert latencies == sorted(latencies, reverse=True)
    assert ten.describe() == "10GbE: 1.18 GB/s, 30 us, 10 us a message"


def test_the_networks_of_the_guide_can_be_given() -> None:
    """The text of docs/scale.md recommends some."""
    guide = (Path(__file__).parents[1] / "docs" / "scale.md").read_text()
    given = re.findall(r"`--network (\d[^`]*)`", guide)
    assert len(given) == 2
    assert [Network.parse(text).name for text in given] == given


@pytest.mark.parametrize(
    "given",
    [
        "",
        "GbE",
        "-1",
        "0",
        "1e3",
        "10G:",
        "10G:soon",
        "10G:10000s",
        "1G:1us:1us:1us",
        "9999999G",
        "10/s",
        "1gb/s",
        "1Mb/s",
        "fastMB/s",
        None,
        10,
    ],
)
def test_what_is_no_network_is_refused(given: object) -> None:
    """A rate, then a time."""
    with pytest.raises(MoeCacheError, match=r"network|time"):
        Network.parse(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "rate"), [("10", "10"), (" 2.5 :5us", "2.5"), ("0", "0")])
def test_a_rate_without_a_unit_is_refused(given: str, rate: str) -> None:
    """It may be bits or bytes that are meant."""
    remedy = f"the rate has no unit; write {rate}Gbit/s or {rate}GB/s"
    with pytest.raises(ConfigError, match=f"network '{given}': {remedy}$"):
        Network.parse(given)


def test_a_link_sends_to_all_others_and_receives_from_them() -> None:
    """What takes longer counts; nothing where there is one."""
    assert SLOW.gather_ns([30, 10, 20]) == 500 + 2 * 200 + 2 * 30
    assert SLOW.gather_ns([30, 30, 2]) == 500 + 2 * 200 + 60
    assert SLOW.gather_ns([20, 50, 50, 50]) == 500 + 3 * 200 + 150
    assert (SLOW.gather_ns([30]), SLOW.gather_ns([])) == (0, 0)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Return the name of a file with a small trace."""
    random_trace(shape=(30, 4, 3)).save(tmp_path / "run.npz")
    return str(tmp_path / "run.npz")


def test_the_command_compares_numbers_of_machines(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each network once for each number, and one machine once; all in a file, too."""
    path = tmp_path / "times.csv"
    options = ["--expert-bytes", "6MB", "--prefetch", "off", "--network", "1GbE,10GbE"]
    options += ["--ranks", "1,2,4", "--csv", str(path)]
    assert cli.main(["simulate", trace, *options, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["num_ranks"], row["network"]) for row in rows] == (
        [(1, "1GbE"), (2, "1GbE"), (4, "1GbE"), (2, "10GbE"), (4, "10GbE")]
    )
    assert rows[1]["tokens_per_s"] < rows[3]["tokens_per_s"]
    with path.open() as file:
        assert [row["num_ranks"] for row in csv.DictReader(file)] == ["1", "2", "4", "2", "4"]

    assert cli.main(["simulate", trace, *options]) == 0
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line.startswith("│")]
    assert [line.split()[1] for line in lines] == ["1", "2", "4", "2", "4"]
    assert "policy echo\nahead off\n" in shown
    assert "10GbE: 1.18 GB/s, 30 us, 10 us a message\n" in shown
    assert max(map(len, lines)) <= 80


def test_one_rank_shows_what_one_machine_does(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same figures, for every mode of prefetch."""
    options = ["--expert-bytes", "6MB", "--json"]
    assert cli.main(["simulate", trace, *options]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert cli.main(["simulate", trace, *options, "--ranks", "1"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [{"trace": "run", **row["ranks"][0]} for row in rows] == alone


def test_a_placement_gives_ranks_slots_by_its_shares(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine with three quarters of the memory has as many of the slots."""
    path = tmp_path / "placement.json"
    Placement.balanced(np.ones((4, 24)), 2, [3, 1]).save(path)
    options = ["--expert-bytes", "1MB", "--prefetch", "off", "--placement", str(path), "--json"]
    assert cli.main(["simulate", trace, *options, "--ranks", "2", "--capacity", "24"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert [one["capacity"] for one in row["ranks"]] == [36, 12]

    assert cli.main(["simulate", trace, *options, "--ranks", "1,2"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "--placement: the placement is of 4 x 24 experts on 2 ranks, and the" in shown.err
    assert cli.main(["simulate", trace, *options[:-2], "absent.json", "--ranks", "2"]) == 1
    assert "absent.json: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks=many"], "--ranks: 'many' is no number of machines"),
        (["--ranks=0"], "--ranks: '0' is no number of machines"),
        (["--ranks=25"], "--ranks: 25 ranks are more than the 24 experts"),
        (["--ranks=2", "--network=1GbE,tin cans"], "--network: network 'tin cans' is neither"),
        (["--ranks=2", "--row-bytes=0"], "--row-bytes: must be from 1"),
        (["--ranks=2", "--capacity=0"], "--capacity: capacity '0' of 96 experts is 0 slots"),
        (["--network=1GbE"], "--network is of several machines; say how many with --ranks"),
        (["--placement=x"], "--placement is of several machines"),
    ],
)
def test_wrong_options_are_named(
    trace: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is simulated, in one line."""
    assert cli.main(["simulate", trace, "--expert-bytes=1MB", *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"moecache: {message}")
