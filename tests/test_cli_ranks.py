"""Commands under torchrun: rank 0 talks, the others follow."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from moecache import cli
from moecache.commands.ranks import rank_table
from moecache.settings import launched_ranks, ranks_environ
from tests.helpers import ranks
from tests.helpers.serving import write_chat_model

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

PROMPT = "def main(argv=None):\n    "
FEW = ("--max-new-tokens", "8", "--memory", "25%", "--temperature", "0")
Captured = pytest.CaptureFixture[str]


def test_the_text_is_that_of_one_process(tiny_moe: Path, tmp_path: Path, capsys: Captured) -> None:
    """Rank 0 writes it, with figures of all ranks and their sum; the other one says nothing."""
    given = ["generate", str(tiny_moe), PROMPT, *FEW]
    first, other = ranks.start_command(tmp_path, *given)
    assert cli.main(given) == 0
    expected = capsys.readouterr().out
    assert [first.wait(), other.wait()] == [0, 0], first.err + other.err
    assert first.out == expected
    assert (other.out, other.err) == ("", "")
    table = [line.split() for line in first.err.splitlines()[-4:]]
    assert [row[0] for row in table] == ["rank", "0", "1", "all"]
    assert [row[1] for row in table[1:]] == ["128", "128", "256"]


def _ask(port: int, tokens: int, *, stream: bool = False) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": "m", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps({**body, "stream": stream}),
        {"Content-Type": "application/json"},
    )
    return connection.getresponse()


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as found:
        text: str = found.read().decode()
        return text


def test_a_server_answers_with_all_ranks(tiny_moe: Path, tmp_path: Path) -> None:
    """One answer, one whose client leaves in the middle, one more; metrics of both ranks."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    path, port = write_chat_model(tiny_moe, tmp_path / "m"), ranks.free_port()
    served = ("serve", str(path), "--port", str(port), "--memory", "50%")
    first, other = ranks.start_command(tmp_path, *served)
    try:
        first.wait_for(f":{port}/v1")
        answer = json.load(_ask(port, 8))
        left = _ask(port, 4000, stream=True)
        left.read(100)
        left.close()
        assert json.load(_ask(port, 8))["choices"] == answer["choices"]
        assert answer["usage"]["completion_tokens"] == 8
        for rank in range(2):
            assert f'moecache_hits_total{{rank="{rank}"' in _metrics(port + rank)
        first.signal(signal.SIGINT)
        assert [first.wait(), other.wait()] == [0, 0], first.err + other.err
        assert "2 answers" in first.err
        assert first.err.splitlines()[-1].startswith(" all")
    finally:
        first.kill()
        other.kill()


def test_a_server_ends_when_an_idle_rank_is_gone(tiny_moe: Path, tmp_path: Path) -> None:
    """With an error that names it; the others end, too."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    path, port = write_chat_model(tiny_moe, tmp_path / "m"), ranks.free_port()
    served = ("serve", str(path), "--port", str(port), "--memory", "50%", "--rank-timeout", "4")
    first, other, third = ranks.start_command(tmp_path, *served, num_ranks=3)
    try:
        first.wait_for(f":{port}/v1")
        other.signal(signal.SIGKILL)
        assert [first.wait(60), third.wait(60)] == [1, 1], first.err + third.err
        gone = "rank 1 is gone, or its process is stopped: no sign of life"
        for one in (first, third):
            assert re.search(
                rf"moecache: rank \d waited in vain for .* to do( next)?: (rank \d: stopped, as )?"
                rf"{gone}",
                one.err,
            ), one.err
    finally:
        for one in (first, other, third):
            one.kill()


@pytest.mark.parametrize(
    ("command", "victim"),
    [
        pytest.param(("generate", "MODEL", PROMPT, *FEW), 0, marks=pytest.mark.nightly),
        (("generate", "MODEL", PROMPT, *FEW), 1),
        pytest.param(("bench", "MODEL"), 1, marks=pytest.mark.nightly),
    ],
)
def test_a_rank_whose_file_is_cut_is_named(
    tiny_moe: Path, tmp_path: Path, command: tuple[str, ...], victim: int
) -> None:
    """Before it has joined the others, which do not wait until nobody can come any more."""
    cut = tmp_path / "cut"
    shutil.copytree(tiny_moe, cut)
    file = max(cut.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size // 2)
    given = [(command[0], str(path), *command[2:]) for path in (tiny_moe, cut)]
    each = given if victim else given[::-1]
    both = ranks.start_command(tmp_path / "run", *each[0], last=each[1])
    try:
        # Much less than the 300 seconds that ranks have to start.
        assert [one.wait(100) for one in both] == [1, 1], both[0].err + both[1].err
        assert both[victim].err.startswith(f"moecache: {file}: ")
        assert re.search(
            rf"moecache: the model was not loaded on all ranks; rank {victim}: it failed: "
            rf"FormatError: {re.escape(str(file))}",
            " ".join(both[1 - victim].err.split()),
        )
    finally:
        for one in both:
            one.kill()


def test_ranks_that_wait_for_orders_end_when_rank_0_is_stopped(
    tiny_moe: Path, tmp_path: Path
) -> None:
    """Though it keeps the store, which then does not answer anybody."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    path = write_chat_model(tiny_moe, tmp_path / "m")
    served = ("serve", str(path), "--port", "0", "--memory", "50%", "--rank-timeout", "2")
    first, other = ranks.start_command(tmp_path, *served)
    try:
        first.wait_for("/v1")
        first.signal(signal.SIGSTOP)
        assert other.wait(60) == 1, other.err
        assert re.search(
            r"moecache: rank 1 waited in vain for what to do next: rank 0 or the launcher, which "
            r"keeps the ranks' store, is stopped, .* has not answered for \d+ s; start all",
            other.err,
        ), other.err
    finally:
        first.kill()
        other.kill()


def test_ctrl_c_ends_a_rank_that_waits_for_the_others(tiny_moe: Path, tmp_path: Path) -> None:
    """Which may not have been started."""
    port = ranks.free_port()
    alone = ranks.Rank(tmp_path, 0, 2, port, (None, ("generate", str(tiny_moe), PROMPT, *FEW)))
    try:
        until = time.monotonic() + 60
        while not _is_open(port):
            assert time.monotonic() < until, alone.err
            time.sleep(0.05)
        alone.signal(signal.SIGINT)
        assert alone.wait(60) == 130, alone.err
    finally:
        alone.kill()


def _is_open(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def test_ctrl_c_on_rank_0_ends_all(tiny_moe: Path, tmp_path: Path) -> None:
    """In the middle of a long text; the other rank says why it ends."""
    long = ("--max-new-tokens", "100000", "--memory", "25%")
    first, other = ranks.start_command(tmp_path, "generate", str(tiny_moe), PROMPT, *long)
    first.wait_for(" ")
    first.signal(signal.SIGINT)
    assert [first.wait(60), other.wait(60)] == [130, 1], first.err + other.err
    assert "rank 0: it was interrupted" in other.err


def test_what_is_for_several_processes_is_refused_in_one(
    tiny_moe: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And chat, whose terminal is one process's, in several."""
    given = ["generate", str(tiny_moe), PROMPT, *FEW]
    assert cli.main([*given, "--placement", "a.json"]) == 2
    assert "--placement is for several processes" in capsys.readouterr().err
    assert cli.main([*given, "--rank-timeout", "3"]) == 2
    assert "--rank-timeout is for several processes" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main([*given, "--rank-timeout", "inf"]) == 2
    assert "--rank-timeout must be a number of seconds from 1 to" in capsys.readouterr().err
    assert cli.main(["bench", str(tiny_moe), "--compare"]) == 2
    assert "--compare is for one process" in capsys.readouterr().err
    assert cli.main(["chat", str(tiny_moe)]) == 2
    assert "chat is for one process" in capsys.readouterr().err


def test_a_process_is_told_which_of_how_many_it_is() -> None:
    """By torchrun's variables; what is no number says nothing."""
    told = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "x"}
    assert launched_ranks(told) == (1, 2, None)
    assert launched_ranks({}) == (None, None, None)


def test_each_run_of_a_benchmark_is_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torchrun's own store, or by one at the next port."""
    monkeypatch.setenv("MASTER_PORT", "4000")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert ranks_environ(3)["MASTER_PORT"] == "4003"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert ranks_environ(3)["MASTER_PORT"] == "4000"


def test_processes_of_one_store_find_each_other_by_their_name(tmp_path: Path) -> None:
    """Not those that were there before, and have ended."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True)
    keys: set[str] = set()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        given = {"name": name, "port": store.port}
        found = ranks.call("tests.helpers.ranks_at_work:added_up", 2, tmp_path / name, **given)
        assert found == [3, 3]
        new = set(store.list_keys()) - keys  # type: ignore[attr-defined]
        keys |= new
        assert sum(key.startswith(f"{name}/") for key in new) >= 2


def test_a_table_has_a_row_per_rank_and_their_sum() -> None:
    """A rank that was not asked for anything has no hit rate."""
    names = ("experts", "capacity", "pool_bytes", "num_hits", "num_misses", "bytes_read")
    one: dict[str, Any] = dict.fromkeys((*names, "stall_ns", "sent_bytes"), 0)
    table = rank_table([{**one, "num_hits": 3, "num_misses": 1}, one])
    assert list(table.columns[4].cells) == ["75.0%", "-", "75.0%"]
