"""A server among strangers: whatever they send, it goes on, and its memory has an end."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moecache import cli
from moecache.sizing.host_memory import peak_rss_bytes
from tests.helpers.ranks import free_port
from tests.helpers.serving import Served, serving, until, write_chat_model

for package in ("torch", "transformers", "starlette", "uvicorn"):
    pytest.importorskip(package)
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
CHAT = "/v1/chat/completions"
HELLO: Any = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "seed": 1}
MIB = 2**20


@pytest.fixture(name="directory", scope="module")
def _directory(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tiny_moe, tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(name="served", scope="module")
def _served(directory: Path) -> Iterator[Served]:
    with serving(directory) as served:
        yield served


def ask(
    served: Served, body: Any = None, path: str = CHAT, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Return the status and the JSON of an answer: to a POST, or a GET without a body."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    with contextlib.closing(connection):
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        connection.request("GET" if body is None else "POST", path, data, headers or {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def goes_on(served: Served) -> None:
    """Check that an honest client is answered."""
    status, answer = ask(served, HELLO)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 2


def test_errors_have_the_shape_that_clients_know(served: Served) -> None:
    """Also those of paths and methods."""
    for path, body, status in (
        (CHAT, b"{", 400),
        (CHAT, {**HELLO, "model": "other"}, 404),
        ("/nowhere", None, 404),
        (CHAT, None, 405),
    ):
        found, answer = ask(served, body, path)
        assert found == status
        assert answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"].keys() == {"message", "type", "param", "code"}
    status, answer = ask(served, HELLO, headers={"Content-Encoding": "gzip"})
    assert (status, "'gzip'; send it as it is" in answer["error"]["message"]) == (415, True)
    too_long = {**HELLO, "messages": [{"role": "user", "content": "x" * 2000}]}
    status, answer = ask(served, too_long)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    goes_on(served)


@pytest.mark.parametrize("has_length", [True, False], ids=["length", "chunks"])
def test_a_body_of_100_mb_is_refused_and_not_kept(served: Served, has_length: bool) -> None:
    """413, though the client sends all of it first."""
    before_bytes = peak_rss_bytes()
    part = bytes(MIB)
    parts = iter([part] * 100)
    length = {"Content-Length": str(100 * MIB)} if has_length else {}
    status, answer = ask(served, parts, headers=length)
    assert status == 413
    assert "send a shorter conversation" in answer["error"]["message"]
    assert peak_rss_bytes() - before_bytes < 30 * MIB
    goes_on(served)


def test_bodies_that_take_all_the_room_together_are_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 says when to ask again; what was held counts no longer."""
    from moecache.serving import bodies

    length = len(json.dumps(HELLO))
    monkeypatch.setattr(bodies, "MOST_HELD_BYTES", length + 1)
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as slow:
        slow.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n".encode())
        slow.sendall(b"Content-Length: 9\r\n\r\n{ ")
        until(lambda: ask(served, HELLO)[0] == 503)
    until(lambda: ask(served, HELLO)[0] == 200)


def test_a_client_that_sends_slowly_is_hung_up_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """408, in the middle of a head, of a body, or before either."""
    from moecache.serving import bodies, server

    monkeypatch.setattr(server, "HEAD_S", 0.1)
    monkeypatch.setattr(bodies, "BODY_S", 0.1)
    for begun in (
        b"",
        b"GET / HTTP/1.1\r\nHost: loc",
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{" % CHAT.encode(),
    ):
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
            client.sendall(begun)
            answer = b"".join(iter(lambda: client.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 408 "), begun
    goes_on(served)


def test_connections_beyond_the_bound_are_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 at once; those that are open are served, and closed ones make room."""
    from moecache.serving import server

    monkeypatch.setattr(server, "MOST_CONNECTIONS", 8)
    address = ("127.0.0.1", served.port)
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(8)
        ]
        for _ in range(50):
            with socket.create_connection(address, timeout=60) as surplus:
                assert surplus.recv(4096).startswith(b"HTTP/1.1 503 ")
        clients[7].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert clients[7].recv(4096).startswith(b"HTTP/1.1 200 ")
    until(lambda: len(served.server.server_state.connections) == 0)
    goes_on(served)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]"}, 200),
        ({"Host": "somewhere.example"}, 403),
        ({"Host": "[", "Origin": "null"}, 403),
        ({"Host": "localhost", "Origin": "http://localhost"}, 200),
        ({"Host": "localhost", "Origin": "http://somewhere.example"}, 403),
        ({"Host": "localhost", "Origin": "null"}, 403),
        ({"Host": "localhost", "Origin": "http://["}, 403),
    ],
)
def test_pages_of_other_sites_are_refused(
    served: Served, headers: dict[str, str], status: int
) -> None:
    """Also those whose name leads here: browsers say what they asked for."""
    assert ask(served, path="/v1/models", headers=headers)[0] == status


@pytest.mark.parametrize(
    ("path", "authorization", "status"),
    [
        ("/v1/models", None, 401),
        ("/metrics", None, 401),
        ("/v1/moecache/state", "Bearer right", 200),
        ("/v1/models", "bearer right", 200),
        ("/v1/models", "Bearer wrong", 401),
        ("/v1/models", "Bearer right and more", 401),
        ("/v1/models", "Basic right", 401),
        ("/health", None, 200),
        ("/livez", None, 200),
        ("/readyz", None, 200),
    ],
)
def test_a_key_is_asked_for(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    authorization: str | None,
    status: int,
) -> None:
    """Of everything but the page itself, and whether the server is well."""
    from moecache.serving.guard import Guard

    guard = served.server.config.loaded_app
    while not isinstance(guard, Guard):
        guard = getattr(guard, "app", None) or guard.middleware_stack
    monkeypatch.setattr(guard, "_key", b"right")
    headers = {} if authorization is None else {"Authorization": authorization}
    found, answer = ask(served, path=path, headers=headers)
    assert found == status
    if status == 401:
        assert answer["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_signal_ends_the_running_answer(directory: Path, stream: bool) -> None:
    """Its client is told; no thread goes on."""
    with serving(directory) as served:
        texts: list[bytes] = []

        def take() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
            with contextlib.closing(connection):
                body = json.dumps({**HELLO, "max_tokens": 900, "stream": stream})
                connection.request("POST", CHAT, body)
                texts.append(connection.getresponse().read())

        client = threading.Thread(target=take)
        client.start()
        until(lambda: served.engine.answer is not None)
        served.server.should_exit = served.server.force_exit = True
        client.join()
    assert b"the server ended before the answer did" in texts[0]
    assert (served.engine.totals.failed, served.engine.totals.left) == (1, 0)
    assert not any(thread.is_alive() for thread in served.engine._generating._thread._threads)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", "70000"), "a port is a number from 0 to 65535, got 70000"),
        (("--host", "nowhere.invalid"), "of nowhere.invalid cannot be served"),
        (("--api-key", ""), "--api-key is empty"),
        (("--api-key", "a b"), "without spaces"),
        (("--queue", "-1"), "--queue must not be negative"),
        (("--max-new-tokens", "0"), "--max-new-tokens must be from 1 to 2147483647"),
    ],
)
def test_wrong_options_are_named_before_anything_is_loaded(
    directory: Path, options: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2."""
    assert cli.main(["serve", str(directory), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken_is_told_at_once(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """And another one, or 0, is the remedy."""
    assert cli.main(["serve", str(served.directory), "--port", str(served.port)]) == 2
    assert "Address already in use; choose another, or 0" in capsys.readouterr().err


def test_sigterm_has_the_running_answer_finished_and_refuses_others(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 0, however many come; the key is of a file, an address of all is warned of."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "key").write_text("secret\n")
    port = free_port()
    command = [sys.executable, "-m", "moecache", "serve", str(directory), "--port", str(port)]
    command += [
        "--memory",
        "25%",
        "--parallel",
        "1",
        "--api-key",
        f"@{tmp_path / 'key'}",
        "--host",
        "0.0.0.0",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert "0.0.0.0 is no address of this machine alone" in first, process.stderr.read()
        served = Served(port, None, None, directory)
        # It listens by then, and has not imported torch.
        assert (ask(served, path="/health")[1]["status"], ask(served, HELLO)[0]) == ("loading", 401)
        assert f":{port}/v1, page at" in process.stderr.readline()
        assert ask(served, path="/health") == (200, {"status": "ok", "waiting": 0})
        key = {"Authorization": "Bearer secret"}
        answers: dict[str, tuple[int, Any]] = {}

        def keep(name: str, tokens: int) -> threading.Thread:
            def run() -> None:
                answers[name] = ask(served, {**HELLO, "max_tokens": tokens}, headers=key)

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        running = keep("running", 200)
        until(lambda: ask(served, path="/v1/moecache/state", headers=key)[1]["generating"])
        waiting = keep("waiting", 2)
        until(lambda: ask(served, path="/health")[1]["waiting"] == 1)
        process.send_signal(signal.SIGTERM)
        waiting.join()
        with pytest.raises(ConnectionRefusedError):
            ask(served, path="/health")
        running.join()
        while process.poll() is None:
            for number in (signal.SIGINT, signal.SIGTERM):
                process.send_signal(number)
            time.sleep(0.0005)
        shown = process.stderr.read()
        assert process.wait(60) == 0, shown
    assert answers["waiting"][0] == 503
    assert answers["running"][0] == 200
    assert answers["running"][1]["usage"]["completion_tokens"] == 200
    assert "1 answers of 200 tokens" in shown
    assert "Traceback" not in shown
    assert os.listdir(tmp_path) == ["key"]
