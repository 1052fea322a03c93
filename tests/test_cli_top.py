"""`moecache top`, `demo --live` and `demo --metrics`: the panel, its source, its errors."""

import contextlib
import dataclasses
import io
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from rich.console import Console

from moecache import cli
from moecache.commands.live import render
from moecache.commands.metrics import metrics_url, read_metrics, served
from moecache.commands.samples import Sample, sample_metrics, sample_stats
from moecache.errors import ConfigError, MissingDependencyError, MoeCacheError
from moecache.telemetry import PrefetchStats, PrometheusCollector, RuntimeStats
from tests.helpers.pages import wait_until
from tests.helpers.runtimes import drain, make_runtime

prometheus_client = pytest.importorskip("prometheus_client")


@pytest.fixture
def stats() -> RuntimeStats:
    """Return a snapshot of two layers' accesses, of a stall of 3 s too, 2 s after opening."""
    with make_runtime(24, staging=0) as runtime:
        for ids in ([[1, 2]], [[1, 3]], [[4, 5], [5, 6]]):
            drain(runtime, 0, np.array(ids))
            drain(runtime, 1, np.array([[1, 2]]))
        runtime.profiler.record_miss_stall(3_000_000_000)
        found = runtime.stats()
    return dataclasses.replace(found, taken_ns=found.opened_ns + 2 * 10**9)


@contextlib.contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[str]:
    """Give the URL of a server that always says the same."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def shown(sample: Sample, recent: Sample | None = None, *, ascii_only: bool = False) -> str:
    """Return the panel as text on a terminal of 100 columns."""
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(render(sample, recent, ascii_only=ascii_only))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_what_is_served_shows_as_what_is_here(stats: RuntimeStats) -> None:
    """A scrape gives the counts of the snapshot, but for the fineness of the stalls."""

    class Source:
        closed = False

        def stats(self) -> RuntimeStats:
            return stats

    source = Source()
    collected = PrometheusCollector(source, per_layer=True).collect()
    here = sample_stats(stats)
    there = sample_metrics(list(collected), taken_s=here.taken_s)

    assert there is not None
    assert there.hit_rates == here.hit_rates == list(stats.hit_rates)
    assert there.hit_rate == stats.hit_rate
    assert there.policy == here.policy == "lru, scope global"
    assert there.elapsed_s == here.elapsed_s == pytest.approx(2)
    for name in here.counts:
        assert there.counts[name] == here.counts[name], name
    assert there.gauges == here.gauges
    assert here.stall_percentile_s(100) == pytest.approx(3, rel=0.125)
    assert 1.5 < there.stall_percentile_s(100) < 6


def test_the_panel_has_rates_and_shares(stats: RuntimeStats) -> None:
    """Hit rate, heat strip, bytes by cause, stalls, steps, experts, prefetch."""
    prefetch = PrefetchStats(
        "auto",
        active=True,
        reason="",
        num_useful=6,
        num_late=2,
        num_wrong=6,
        num_cancelled=2,
    )
    text = shown(sample_stats(dataclasses.replace(stats, prefetch=prefetch)))

    assert "moecache, lru, scope global" in text
    assert f"{stats.hit_rate:.1%} since the start" in text
    assert f"{stats.bytes_read / 2:.0f} B/s: demand {stats.bytes_demand // 2} B, bulk" in text
    assert "warm_start" not in text
    assert f"{stats.num_stalls / 2:.0f}/s" in text
    assert "p99 " in text
    assert "of them all resident" in text
    assert "of 24 resident in 24 slots" in text
    assert "auto, on now; precision 50.0% (6 useful, 2 late, 6 wrong, 2 cancelled)" in text
    assert "failed" not in text


def test_the_strip_is_one_cell_per_layer(stats: RuntimeStats) -> None:
    """Its height is the hit rate; blank without an access; digits where there are no blocks."""
    sample = dataclasses.replace(
        sample_stats(stats),
        layer_hits={0: 0, 1: 5, 2: 0, 3: 10},
        layer_misses={0: 9, 1: 5, 2: 0, 3: 0},
    )

    assert "▁▅ █  0% to 100%" in shown(sample)
    assert "05 9  0% to 100%" in shown(sample, ascii_only=True)


def test_many_layers_share_cells(stats: RuntimeStats) -> None:
    """A strip fits into a terminal."""
    sample = dataclasses.replace(
        sample_stats(stats),
        layer_hits=dict.fromkeys(range(300), 1),
        layer_misses=dict.fromkeys(range(300), 0),
    )

    assert "█" * 60 + "  100% to 100%" in shown(sample)


def test_a_difference_of_samples_has_its_own_rates(stats: RuntimeStats) -> None:
    """Between two moments; a count that fell means that the server began anew."""
    earlier = sample_stats(stats)
    later = dataclasses.replace(
        earlier,
        taken_s=earlier.taken_s + 4,
        counts={**earlier.counts, "hits": earlier.counts["hits"] + 30, "demand": 10**6},
        layer_hits={**earlier.layer_hits, 0: earlier.layer_hits[0] + 30},
    )

    between = later.since(earlier)

    assert between.hit_rate == 1.0
    assert between.hit_rates == [1.0, None, None]
    assert between.per_s("hits") == 7.5
    assert between.per_s("stalls") == between.stall_percentile_s(99) == 0
    assert "100.0% now" in shown(later, between)
    assert earlier.since(later) is earlier


def test_a_server_can_only_give_wrong_numbers() -> None:
    """No number, negative ones and layers that cannot be do no harm; names are made printable."""
    text = (
        "moecache_uptime_seconds 1\n"
        "moecache_hits_total NaN\nmoecache_misses_total -5\nmoecache_slots +Inf\n"
        'moecache_layer_hits_total{layer="999999999999"} 1\n'
        'moecache_layer_hits_total{layer="x"} 1\n'
        'moecache_stall_seconds_bucket{le="abc"} 1\n'
        'moecache_runtime_info{policy="\x1b[31m[red]",scope="s"} 1\n'
    )
    with answering(text.encode()) as url:
        sample = read_metrics(url)

    assert sample.hit_rate is None
    assert sample.hit_rates == []
    assert "\x1b" not in shown(sample)
    assert "\\x1b[31m[red], scope s" in shown(sample)
    assert "per_layer=True" in shown(sample)


@pytest.mark.parametrize(
    "layer",
    ["0000000019999999999999999999", "4096", "00001", "-1", "1_0", "\u0661", " 1", "9" * 5000],
)
def test_layers_that_cannot_be_are_left_out(layer: str) -> None:
    """No room is made for them, however their numbers are written."""
    lines = [f'moecache_layer_hits_total{{layer="{number}"}} 1\n' for number in ("1", layer)]
    with answering(("moecache_uptime_seconds 1\n" + "".join(lines)).encode()) as url:
        assert dict(read_metrics(url).layer_hits) == {1: 1.0}


@pytest.mark.parametrize("uptime", ["1e-320", "1e-9", "1", "1.7e308"])
def test_numbers_that_overflow_are_shown_as_some_number(uptime: str) -> None:
    """Sums of several runtimes' figures, and quotients of them, stay finite."""
    names = ("hits", "misses", "steps", "resident_steps", "evictions", "failed_expert_reads")
    served_names = [f"moecache_{name}_total" for name in names]
    served_names += [f"moecache_stall_seconds_{part}" for part in ("count", "sum")]
    served_names += [f"moecache_{name}" for name in ("slots", "experts", "resident_experts")]
    for kind, label in (("read_bytes", "cause"), ("prefetch_experts", "outcome")):
        values = ("demand", "bulk") if label == "cause" else ("useful", "late", "wrong")
        served_names += [f'moecache_{kind}_total{{{label}="{value}"}}' for value in values]
    for name in ("hits", "misses"):
        served_names.append(f'moecache_layer_{name}_total{{layer="0"}}')
    served_names += [f'moecache_stall_seconds_bucket{{le="{le}"}}' for le in ("-1e308", "1e308")]
    served_names += ['moecache_prefetch_active{mode="echo"}']
    text = "".join(
        f'{name[:-1]},run="{run}"}} 1.7e308\n'
        if name.endswith("}")
        else f'{name}{{run="{run}"}} 1.7e308\n'
        for name in served_names
        for run in range(3)
    )
    smallest = f"moecache_uptime_seconds {uptime}\nmoecache_steps_total 1e-320\n"
    with answering(text.encode() + smallest.encode()) as url:
        sample = read_metrics(url)

    assert sample.hit_rate == 0.5
    assert sample.precision == pytest.approx(2 / 3)
    for panel in (shown(sample), shown(sample, sample.since(sample))):
        assert not re.search(r"\b(nan|inf)", panel)


@pytest.mark.parametrize(
    "text",
    [
        "http://me:secret@localhost:9100/metrics",
        "me:secret@localhost",
        "ftp://me:secret@localhost",
        "http://me:se/cret@localhost",
        "http://me:secret@[x",
    ],
)
def test_a_password_is_refused_and_not_repeated(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Terminals are recorded, and looked over."""
    assert cli.main(["top", text]) == 2
    shown_text = "".join(capsys.readouterr())
    assert "a user and a password cannot be given" in shown_text
    assert "cret" not in shown_text


@pytest.mark.parametrize("text", ["http://h\u00f6st:1/metrics", "localhost:1/\u00fc", "h\udcff"])
def test_a_url_beyond_ascii_is_refused(text: str) -> None:
    """It says how it may be written."""
    with pytest.raises(ConfigError, match="has letters beyond ASCII; write the host as xn--"):
        metrics_url(text)


@pytest.mark.parametrize("start", [b"", b"HTTP/1.0 200 OK\r\n\r\n"], ids=["header", "body"])
def test_an_answer_that_never_ends_is_given_up(
    start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte that comes now and then does not help: the limit is for the whole answer."""
    monkeypatch.setattr("moecache.commands.metrics._TIMEOUT_S", 0.5)
    over = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(start)
            for _ in range(600):
                if over.wait(0.05):
                    break
                connection.sendall(b"#")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        try:
            with pytest.raises(MoeCacheError, match=r"no answer: not all of it came in 0\.5 s"):
                read_metrics(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics")
        finally:
            over.set()
            thread.join()


@contextlib.contextmanager
def saying(*answers: bytes) -> Iterator[str]:
    """Give the URL of a server that says each of these once, and hangs up."""

    def say(listener: socket.socket) -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=say, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
        thread.join()


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("target", ["ftp://127.0.0.1/x", "https://127.0.0.1:1/x", "file:///x"])
def test_another_scheme_is_not_followed(target: str, code: int) -> None:
    """The program that answers on a port does not choose what is read."""
    answer = f"HTTP/1.0 {code} Found\r\nLocation: {target}\r\n\r\n".encode()
    with saying(answer) as url, pytest.raises(MoeCacheError, match="redirects to") as caught:
        read_metrics(url)
    assert f"redirects to {target}, which is not http; give the address" in str(caught.value)


def test_another_path_is_followed() -> None:
    """As from /metrics to /metrics/."""
    redirect = b"HTTP/1.0 301 Moved\r\nLocation: /metrics/\r\n\r\n"
    with saying(redirect, b"HTTP/1.0 200 OK\r\n\r\nmoecache_uptime_seconds 1\n") as url:
        assert read_metrics(url).elapsed_s == 1


def test_an_answer_that_ends_early_is_an_error() -> None:
    """Else a part of the figures would be taken for all of them."""
    body = b"moecache_uptime_seconds 1\n"
    answer = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body) + 7, body)
    with (
        saying(answer) as url,
        pytest.raises(MoeCacheError, match="ends after 26 bytes, 7 before its end; try again"),
    ):
        read_metrics(url)


def test_clients_that_say_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client too many takes the place of the first: a hundred do not get a thread each."""
    monkeypatch.setattr("moecache.commands.metrics_server._MOST_CLIENTS", 3)
    with make_runtime(24, staging=0) as runtime, served(runtime, 0) as url:
        address = ("127.0.0.1", int(url.split(":")[2].split("/")[0]))
        before = threading.active_count()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.create_connection(address)) for _ in range(20)]
            # Those that were hung up on read the end.
            for client in clients[:-3]:
                assert client.recv(1) == b""
            assert read_metrics(url).gauges["experts"] == 24
            wait_until(lambda: threading.active_count() <= before + 3)


def test_a_client_that_is_slow_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte that comes now and then does not help."""
    monkeypatch.setattr("moecache.commands.metrics_server._CLIENT_S", 0.3)
    with make_runtime(24, staging=0) as runtime, served(runtime, 0) as url:
        address = ("127.0.0.1", int(url.split(":")[2].split("/")[0]))
        with socket.create_connection(address) as silent, socket.create_connection(address) as slow:
            slow.settimeout(0.05)
            heard: bytes | None = None
            with contextlib.suppress(ConnectionError):
                while heard is None:
                    slow.sendall(b"G")
                    with contextlib.suppress(TimeoutError):
                        heard = slow.recv(1)
            assert not heard
            assert silent.recv(1) == b""
            assert read_metrics(url).gauges["experts"] == 24


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:9100", "http://localhost:9100/metrics"),
        ("http://host:9100/", "http://host:9100/metrics"),
        ("https://host/other?a=b", "https://host/other?a=b"),
        ("[::1]:9100", "http://[::1]:9100/metrics"),
    ],
)
def test_what_a_url_leaves_out_is_filled_in(text: str, url: str) -> None:
    """The scheme and the path."""
    assert metrics_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        *("", "ftp://host", "file:///etc/passwd", "/run/server.pid", "12345"),
        *("http://", "host:99999", "a b:1", "http://[x"),
    ],
)
def test_what_is_no_url_is_refused(text: str) -> None:
    """Nothing but http and https is read."""
    with pytest.raises(ConfigError, match="is no http:// address of metrics; write for"):
        metrics_url(text)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 404, "answers 404; is this the path"),
        (b"", 200, "has no metrics of an open moecache runtime; register"),
        (b"other_total 1\n", 200, "has no metrics of an open moecache runtime"),
        (b"<html><body>hello</body></html>", 200, "no Prometheus text"),
        (b"\xff\xfe", 200, "no Prometheus text"),
        (b'moecache_hits_total{le="', 200, "no Prometheus text"),
        (b"#" * (16 * 2**20 + 1), 200, "more than 16 MiB"),
    ],
)
def test_an_answer_that_is_none_is_an_error(body: bytes, status: int, message: str) -> None:
    """It says what was asked, what was found and what to do."""
    with answering(body, status) as url, pytest.raises(MoeCacheError, match=message) as caught:
        read_metrics(url)
    assert url in str(caught.value)


def test_no_server_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1; wrong usage is 2."""
    with answering(b"") as url:
        pass
    assert cli.main(["top", url]) == 1
    assert "no answer: Connection refused; does the server run" in capsys.readouterr().err
    assert cli.main(["top", "ftp://x"]) == 2
    assert cli.main(["top", url, "--interval", "0"]) == 2
    assert "--interval must be 0.1 to 3600 seconds, got 0.0" in capsys.readouterr().err


def test_without_the_client_top_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """It parses with the client's parser."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'moecache\[prometheus\]'"):
        read_metrics("http://127.0.0.1:1/metrics")


def test_top_once_shows_the_figures_since_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a runtime that is served by this process."""
    with make_runtime(24, staging=0) as runtime, served(runtime, 0) as url:
        drain(runtime, 0, np.array([[1, 2]]))
        drain(runtime, 0, np.array([[1, 3]]))
        assert cli.main(["top", url, "--once"]) == 0

    assert "25.0% since the start" in capsys.readouterr().out


def test_top_without_a_terminal_prints_a_panel_per_interval(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happened in between; Ctrl-C is its ordinary end."""
    with make_runtime(24, staging=0) as runtime, served(runtime, 0) as url:
        drain(runtime, 0, np.array([[1, 2]]))
        waits = iter(range(2))

        def sleep(_: float) -> None:
            if next(waits, None) is None:
                raise KeyboardInterrupt
            drain(runtime, 0, np.array([[1, 2]]))

        monkeypatch.setattr("moecache.commands.top.time.sleep", sleep)
        assert cli.main(["top", url]) == 0

    out = capsys.readouterr().out
    assert "100.0% now, 50.0% since the start" in out
    assert "100.0% now, 66.7% since the start" in out


def test_top_without_a_terminal_ends_with_its_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script is told."""
    with make_runtime(24, staging=0) as runtime, contextlib.ExitStack() as stack:
        url = stack.enter_context(served(runtime, 0))
        monkeypatch.setattr("moecache.commands.top.time.sleep", lambda _: stack.close())
        assert cli.main(["top", url]) == 1

    assert "no answer" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_that_is_none_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before any text is generated."""
    assert cli.main(["demo", "--metrics", port]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"from 0 to 65535, got {port}" in captured.err


def test_a_port_that_is_taken_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With the remedy."""
    with answering(b"") as url:
        port = re.findall(r":(\d+)/", url)[0]
        assert cli.main(["demo", "--metrics", port]) == 2
    assert f"port {port} of 127.0.0.1 cannot be served: Address already" in capsys.readouterr().err


def test_demo_serves_its_metrics_until_ctrl_c() -> None:
    """They are there when it has ended, and the interrupt does not change the exit code."""
    command = [sys.executable, "-m", "moecache", "demo", "--metrics", "0", "--max-new-tokens", "9"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "until Ctrl-C" in line:
                break
        sample = read_metrics(line.split()[2])
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0

    assert sample.counts["steps"] == 8 * 9
    assert len(sample.hit_rates) == 8


def test_demo_live_shows_nothing_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """Text and figures are as without it."""
    shown = []
    for options in ([], ["--live"]):
        assert cli.main(["demo", "--max-new-tokens", "9", *options]) == 0
        shown.append(capfd.readouterr())

    assert shown[0].out == shown[1].out
    assert "by layer" not in shown[1].err


def test_demo_live_draws_on_its_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """The panel on standard error; the text is whole, there too if both are one terminal."""
    assert cli.main(["demo", "--max-new-tokens", "40"]) == 0
    plain = capsys.readouterr().out
    command = [sys.executable, "-m", "moecache", "demo", "--max-new-tokens", "40"]

    together, nothing = on_terminal([*command, "--live"], shared=True)
    drawn, out = on_terminal([*command, "--live"], shared=False)

    for text in (together, drawn):
        assert "by layer" in text
        assert "moecache, echo" in text
        assert "equal, bit for bit" in text
    assert plain in together.replace("\r\n", "\n")
    assert nothing == ""
    assert out == plain


def on_terminal(command: list[str], *, shared: bool) -> tuple[str, str]:
    """Run a command with standard error, and output if shared, on a terminal; return both."""
    mine, its = pty.openpty()
    with subprocess.Popen(
        ["env", "TERM=xterm-256color", "COLUMNS=100", "LINES=50", *command],
        stdout=its if shared else subprocess.PIPE,
        stderr=its,
    ) as process:
        os.close(its)
        parts: list[bytes] = []
        # Read until no process has the other end open: Linux says so by EIO.
        with contextlib.suppress(OSError):
            while part := os.read(mine, 65536):
                parts.append(part)
        os.close(mine)
        out = b"" if process.stdout is None else process.stdout.read()
        assert process.wait(timeout=60) == 0
    return b"".join(parts).decode(errors="replace"), out.decode()
