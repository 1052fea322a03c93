"""A server before it has its model: it says so, and who would wait for the model may."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moecache import cli
from moecache.errors import StoreError
from tests.helpers.ranks import free_port
from tests.helpers.serving import until

fronts = pytest.importorskip("moecache.serving.front")
loads = pytest.importorskip("moecache.telemetry.loading")
servers = pytest.importorskip("moecache.serving.server")

ROOT = Path(__file__).parents[1]
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
HANGING_TORCH = "import time\ntime.sleep(60)\n"


@dataclass
class Answer:
    """What a server answered; names of headers in small letters."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


@dataclass
class Early:
    """A server whose model is not there yet."""

    port: int
    front: Any
    loading: Any
    server: Any
    asked: list[bytes] = field(default_factory=list)

    def ask(self, path: str, body: Any = None, **headers: str) -> Answer:
        """Return the answer to a GET, or a POST of a body."""
        return ask(self.port, path, body, **headers)

    def open(self) -> None:
        """Have the model: an application that answers with what it is asked."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            body, more = b"", True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body, more = body + message["body"], message["more_body"]
            self.asked.append(body)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body or scope["path"].encode()})

        async def stop() -> None:
            pass

        self.front.open(app, SimpleNamespace(drain=lambda: None, stop=stop))

    @contextlib.contextmanager
    def waiting(self, body: Any, seconds: int = 60) -> Iterator[list[Answer]]:
        """Have a client wait for the model; its answer is there after the block."""
        with asking(self.port, CHAT, body, Prefer=f"wait={seconds}") as answers:
            yield answers


def ask(port: int, path: str, body: Any = None, **headers: str) -> Answer:
    """Return a server's answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        data = None if body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, data, headers)
        found = connection.getresponse()
        return Answer(
            found.status, {name.lower(): value for name, value in found.getheaders()}, found.read()
        )


@contextlib.contextmanager
def asking(port: int, path: str, body: Any, **headers: str) -> Iterator[list[Answer]]:
    """Ask in a thread, once the server knows of it; give the answers, complete after the block."""
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(ask(port, path, body, **headers)))
    thread.start()
    try:
        until(lambda: ask(port, "/health").json["waiting"] == 1)
        yield answers
    finally:
        thread.join()


@contextlib.contextmanager
def listening(**options: Any) -> Iterator[Early]:
    """Serve before there is a model."""
    loading = loads.Loading()
    front = fronts.Front(("tiny", "models/tiny"), loading, **options)
    server = servers.Server(front, front)
    with contextlib.closing(servers.bind("127.0.0.1", 0)) as bound, contextlib.closing(server):
        server.start(bound)
        yield Early(bound.getsockname()[1], front, loading, server)
    assert not [one for one in threading.enumerate() if one.name == "moecache-server"]


@pytest.fixture(name="early")
def _early() -> Iterator[Early]:
    with listening() as early:
        yield early


def test_liveness_readiness_and_the_phase_are_told(early: Early) -> None:
    """As llama-server answers while it loads, with the phase and its bytes."""
    early.loading.enter("importing torch", lambda: (1, 4))

    assert (early.ask("/livez").status, early.ask("/livez").json) == (200, {"status": "alive"})
    for path in ("/health", "/readyz", "/v1/moecache/state"):
        found = early.ask(path)
        assert found.status == 503
        assert int(found.headers["retry-after"]) >= 1
        assert found.json["error"] == {
            "code": 503,
            "message": "Loading model",
            "type": "unavailable_error",
        }
        figures = found.json["loading"]
        assert figures.pop("seconds") >= 0
        assert figures == {"phase": "importing torch", "done_bytes": 1, "total_bytes": 4}

    early.loading.note("reading experts ahead", 2, 8)
    assert early.ask("/health").json["loading"]["phase"] == "reading experts ahead"


def test_the_models_name_the_metrics_and_the_page_are_there_before_the_model(
    early: Early,
) -> None:
    """The page polls, and shows what it is told."""
    early.loading.note("reading experts ahead", 2, 8)
    assert [one["id"] for one in early.ask("/v1/models").json["data"]] == ["tiny"]
    assert early.ask("/v1/models/models/tiny").json["id"] == "tiny"
    assert early.ask("/v1/models/other").status == 404
    metrics = early.ask("/metrics").body.decode()
    assert "moecache_ready 0.0" in metrics
    assert "moecache_loading_done_bytes 2.0" in metrics
    assert b"showLoading" in early.ask("/").body


def test_a_request_before_the_model_is_refused_as_its_protocol_has_it(early: Early) -> None:
    """With the time to come back; the connection stays, as the body was read."""
    connection = http.client.HTTPConnection("127.0.0.1", early.port, timeout=60)
    with contextlib.closing(connection):
        for path in (CHAT, MESSAGES):
            connection.request("POST", path, json.dumps({"messages": ["x" * 200_000]}))
            found = connection.getresponse()
            error = json.loads(found.read())["error"]
            assert (found.status, found.headers["Retry-After"]) == (503, "1")
            assert "the model is being loaded (starting" in error["message"]
            assert "Prefer: wait=SECONDS" in error["message"]
            kinds = {CHAT: "server_error", MESSAGES: "overloaded_error"}
            assert error["type"] == kinds[path]
    assert early.ask(CHAT, {}).json["error"]["code"] == "model_loading"
    for path in ("/props", "/slots"):
        assert early.ask(path).status == 503


def test_a_request_that_would_wait_is_answered_by_the_model(early: Early) -> None:
    """With its whole body; all that comes later goes to the model at once."""
    body = {"messages": ["x" * 200_000]}
    with early.waiting(body) as answers:
        assert answers == []
        early.open()
    assert (answers[0].status, answers[0].json) == (200, body)
    assert early.ask(CHAT, {"n": 2}).json == {"n": 2}
    assert early.ask("/health").body == b"/health"


def test_a_request_waits_no_longer_than_it_says(
    early: Early, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what happens afterwards is nothing to it."""
    monkeypatch.setattr(fronts, "_MOST_WAIT_S", 0.05)
    found = early.ask(CHAT, {}, Prefer="wait=60")
    assert (found.status, found.json["error"]["code"]) == (503, "model_loading")
    early.open()
    assert early.ask(CHAT, {}, Prefer="wait=60").status == 200
    assert len(early.asked) == 1


@pytest.mark.parametrize(
    ("preference", "seconds"),
    [
        ("wait=7", 7),
        ('respond-async, WAIT = "7"; foo', 7),
        ("wait=7, wait=8", 7),
        ("wait=999999999", 3600),
        ("wait=99999999999999999999", 0),
        ("wait=-1", 0),
        ("await=7", 0),
        ("handling=lenient", 0),
    ],
)
def test_preferences_are_read_as_rfc_7240_has_them(preference: str, seconds: int) -> None:
    """What is no preference of this server is ignored."""
    headers = fronts.Headers({"prefer": preference})
    assert fronts._wait_of(headers) == seconds


def test_waiting_has_a_bound_and_who_leaves_makes_room() -> None:
    """Else those that wait would take all connections, also those of probes."""
    with listening(most_waiting=1) as early:
        with socket.create_connection(("127.0.0.1", early.port), timeout=60) as client:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
            client.sendall(f"{head}Prefer: wait=60\r\n\r\n{{}}".encode())
            until(lambda: early.ask("/health").json["waiting"] == 1)
            refused = early.ask(CHAT, {}, Prefer="wait=60")
            assert refused.status == 503
            assert "1 requests wait for the model already" in refused.json["error"]["message"]
        until(lambda: early.ask("/health").json["waiting"] == 0)
        with early.waiting({"n": 1}) as answers:
            early.open()
        assert answers[0].status == 200
        assert early.asked == [b'{"n": 1}']


def test_key_and_origin_are_asked_for_from_the_first_moment_on() -> None:
    """Probes and the page need none; a request that would wait does."""
    with listening(key="right") as early:
        for path in ("/livez", "/", "/health", "/readyz"):
            assert early.ask(path).status == (503 if path in ("/health", "/readyz") else 200)
        for path in ("/v1/models", "/metrics", "/v1/moecache/state", "/props"):
            assert early.ask(path).status == 401
        assert early.ask(CHAT, {}, Prefer="wait=60").status == 401
        assert early.ask("/v1/models", Authorization="Bearer right").status == 200
        assert early.ask("/livez", Host="somewhere.example").status == 403
        assert early.ask("/livez", Origin="http://somewhere.example").status == 403


def test_a_server_that_ends_before_its_model_tells_those_that_wait() -> None:
    """503, and the connection is closed; a client that is still sending delays nothing."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nPrefer: wait=60\r\nContent-Length: 2\r\n"
    with contextlib.ExitStack() as stack:
        early = stack.enter_context(listening())
        waits, sends = (
            stack.enter_context(socket.create_connection(("127.0.0.1", early.port), timeout=60))
            for _ in range(2)
        )
        sends.sendall(f"{head}\r\n{{".encode())
        waits.sendall(f"{head}\r\n{{}}".encode())
        until(lambda: early.ask("/health").json["waiting"] == 1)
        early.server.close()
        told = b"".join(iter(lambda: waits.recv(4096), b""))
        assert told.startswith(b"HTTP/1.1 503 ")
        assert b"the server ends" in told
        with contextlib.suppress(ConnectionResetError):
            assert sends.recv(99) == b""
    early.open()  # of a load that goes on; nobody asks it
    assert early.asked == []


def test_a_second_signal_cuts_clients_that_are_still_sending(
    early: Early, caplog: pytest.LogCaptureFixture
) -> None:
    """They are told nothing, and nothing is logged as an error."""
    early.open()
    with socket.create_connection(("127.0.0.1", early.port), timeout=60) as client:
        client.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n".encode())
        client.sendall(b"Content-Length: 9\r\n\r\n{ ")
        until(lambda: early.server.server_state.tasks)
        for _ in range(2):
            early.server.handle_exit(signal.SIGINT, None)
        early.server.wait()
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(99) == b""
    assert caplog.records == []


def test_the_time_to_come_back_is_that_of_the_bytes_that_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the rate so far; a second where nothing is known, a minute at most."""
    now_s = 100.0
    monkeypatch.setattr(loads.time, "monotonic", lambda: now_s)
    loading = loads.Loading()
    assert loading.retry_s() == 1
    loading.enter("building the model", lambda: (0, 10))
    assert loading.retry_s() == 1
    loading.note("reading experts ahead", 0, 40)
    now_s += 2
    loading.note("reading experts ahead", 10, 40)
    assert loading.retry_s() == 6
    loading.note("reading experts ahead", 1, 4000)
    assert loading.retry_s() == 60
    loading.note("reading experts ahead", 40, 40)
    assert loading.retry_s() == 1
    assert loading.figures()["seconds"] == 2.0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_the_command_answers_before_torch_is_there_and_ends_by_a_signal(
    tiny_moe: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """An import of torch that does not end keeps neither health nor signals waiting."""
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text(HANGING_TORCH)
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moecache", "serve", str(tiny_moe), "--port", str(port)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},  # noqa: TID251 - a child's
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:

        def phase() -> str | None:
            with contextlib.suppress(ConnectionRefusedError):
                return str(ask(port, "/health").json["loading"]["phase"])
            return None

        until(lambda: phase() == "importing torch")
        assert [one["id"] for one in ask(port, "/v1/models").json["data"]] == ["tiny_moe"]
        with (
            asking(port, CHAT, {}, Prefer="wait=60")
            if number == signal.SIGINT
            else (contextlib.nullcontext([])) as answers
        ):
            process.send_signal(number)
        assert process.wait(60) == code
        assert process.stderr is not None
        assert process.stderr.read() == ("moecache: interrupted\n" if code == 130 else "")
    assert [one.status for one in answers] == [503] * len(answers)


def test_a_load_that_fails_is_the_commands_error_and_those_that_wait_are_told(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No thread is left, and nobody listens any more."""
    monkeypatch.setattr("moecache.serving.check_serving", lambda: None)
    port, clients = free_port(), contextlib.ExitStack()
    found: list[list[Answer]] = []

    class Failing(ModuleType):
        def __getattr__(self, _: str) -> Any:
            # The client goes on in its thread.
            found.append(clients.enter_context(asking(port, CHAT, {}, Prefer="wait=60")))
            raise StoreError("the disk is gone")

    name = "moecache.integrations.transformers"
    monkeypatch.setitem(sys.modules, name, Failing(name))
    with clients:
        assert cli.main(["serve", str(tiny_moe), "--port", str(port)]) == 1
    assert capsys.readouterr().err == "moecache: the disk is gone\n"
    assert [one.status for one in found[0]] == [503]
    assert not [one for one in threading.enumerate() if one.name == "moecache-server"]
    with pytest.raises(ConnectionRefusedError):
        ask(port, "/health")
