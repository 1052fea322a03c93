"""What is no HTTP: its connection ends, nothing is logged, and others go on."""

import asyncio
import contextlib
import gc
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.serving import Served, serving, until

for package in ("torch", "transformers", "starlette", "uvicorn"):
    pytest.importorskip(package)
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
CHAT = b"/v1/chat/completions"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
GOOD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(name="served", scope="module")
def _served(tiny_moe: Path) -> Iterator[Served]:
    with serving(tiny_moe, compute="torch") as served:
        yield served


def head(path: bytes, headers: bytes = CHUNKED, *, version: bytes = b"1.1") -> bytes:
    """Return the head of a POST."""
    return b"POST %s HTTP/%s\r\nHost: localhost\r\n%s\r\n" % (path, version, headers)


def told(port: int, *parts: bytes) -> bytes:
    """Send parts, each once the last is answered or has had time; return all that comes back."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        for part in parts[:-1]:
            client.sendall(part)
            client.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                found += client.recv(65536)
        client.settimeout(60)
        # The server may have closed before all was sent.
        with contextlib.suppress(ConnectionError):
            client.sendall(parts[-1])
            while data := client.recv(65536):
                found += data
    return found


def loud(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the server logged above DEBUG, also of tasks that nobody asks."""
    gc.collect()
    rooms = ("asyncio", "h11", "moecache.serving", "uvicorn")
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno > logging.DEBUG and record.name.startswith(rooms)
    ]


@pytest.mark.parametrize(
    "body",
    [
        (b"ZZ\r\n",),
        (b"", b"ZZ\r\n"),
        (b"2\r\n{ \r\n", b"ZZ\r\n"),
        (b"2\r\n{ \r\n1", b"\r\n{xx"),
        (b"2;" + b"x" * 20_000,),
        (b"f" * 21 + b"\r\n",),
    ],
    ids=["at once", "later", "second", "no end", "long", "large"],
)
def test_a_body_that_is_no_http_gets_one_answer_and_no_line_in_the_log(
    served: Served, caplog: pytest.LogCaptureFixture, body: tuple[bytes, ...]
) -> None:
    """That of the error, or the application's if it came before the error."""
    caplog.set_level(logging.DEBUG)
    for version in (b"1.1", b"1.0"):
        for path, headers in (
            (b"/health", b""),
            (b"/nowhere", b""),
            (CHAT, b""),
            (CHAT, b"Content-Encoding: gzip\r\n"),
            (CHAT, b"Origin: http://elsewhere.example\r\n"),
            (CHAT, b"Content-Length: 2\r\n"),
            (b"/v1/models", b"Expect: 100-continue\r\n"),
        ):
            begun = head(path, CHUNKED + headers, version=version)
            found = told(served.port, begun + body[0], *body[1:])
            assert found.replace(b"HTTP/1.1 100 ", b"").count(b"HTTP/1.1 ") == 1, (path, headers)
    until(lambda: not served.server.server_state.tasks)
    assert served.get("/health")["status"] == "ok"
    assert loud(caplog) == []


def test_a_key_that_is_missing_is_no_way_to_fill_the_log(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """401 and 403 are answered without their bodies."""
    from moecache.serving.guard import Guard

    monkeypatch.setattr(Guard, "_refusal", lambda *_: (401, "no key"))
    for body in (b"ZZ\r\n", b"2\r\n{ \r\nZZ\r\n"):
        found = told(served.port, head(b"/v1/models") + body)
        assert found.startswith(b"HTTP/1.1 400 ")
        assert found.count(b"HTTP/1.1 ") == 1
    until(lambda: not served.server.server_state.tasks)
    assert loud(caplog) == []


@pytest.mark.parametrize("sent", [b"2\r\n{ \r\n", b"2\r\n{", b"2"])
def test_a_body_that_ends_early_is_left(
    served: Served, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    """Nothing is answered: its client is gone."""
    for headers in (CHUNKED, b"Content-Length: 99\r\n"):
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
            client.sendall(head(CHAT, headers) + sent)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(4096) == b""
    until(lambda: not served.server.server_state.tasks)
    assert loud(caplog) == []


@pytest.mark.parametrize("rubbish", [b"\0\1\2 nothing\r\n\r\n", b"GET /health HTTP/9\r\n\r\n"])
def test_rubbish_behind_a_request_does_not_cost_its_answer(
    served: Served, caplog: pytest.LogCaptureFixture, rubbish: bytes
) -> None:
    """Pipelined, it gets an answer of its own; where the connection is to end anyway, none."""
    found = told(served.port, GOOD + rubbish)
    assert found.startswith(b"HTTP/1.1 200 ")
    assert found.count(b"HTTP/1.1 ") == 2
    assert b"HTTP/1.1 400 " in found

    closing = GOOD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    for parts in ((closing + rubbish,), (closing[:-1], closing[-1:] + rubbish)):
        found = told(served.port, *parts)
        assert found.startswith(b"HTTP/1.1 200 ")
        assert found.count(b"HTTP/1.1 ") == 1
    assert loud(caplog) == []


@contextlib.contextmanager
def answering(app: Any) -> Iterator[tuple[int, Any]]:
    """Serve an ASGI application; give its port and its server."""
    from moecache.serving.server import Server, bind

    async def stop() -> None:
        pass

    engine: Any = SimpleNamespace(drain=lambda: None, stop=stop)
    with contextlib.closing(bind("127.0.0.1", 0)) as bound:
        server = Server(app, engine)
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        try:
            until(lambda: server.started)
            yield bound.getsockname()[1], server
        finally:
            server.should_exit = True
            thread.join()


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("begins", [True, False])
def test_an_answer_that_has_begun_ends_with_its_request(
    caplog: pytest.LogCaptureFixture, version: bytes, reads: bool, begins: bool
) -> None:
    """Whether the application reads the body or not: it is told, and what it sends is dropped."""
    seen: list[str] = []
    waits, failed = threading.Event(), threading.Event()

    async def app(_: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": []}
        if begins:
            await send(start)
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        waits.set()
        if reads:
            message = await receive()
            while message["type"] == "http.request":
                message = await receive()
            seen.append(message["type"])
        await asyncio.to_thread(failed.wait)
        if not begins:
            await send(start)
        await send({"type": "http.response.body", "body": b"not to be seen"})

    with answering(app) as (port, server):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(head(b"/", version=version) + b"2\r\n{ \r\n")
            assert waits.wait(60)
            client.sendall(b"ZZ\r\n")
            found = b""
            with contextlib.suppress(ConnectionError):
                while data := client.recv(4096):
                    found += data
        failed.set()
        until(lambda: not server.server_state.tasks)
    assert b"not to be seen" not in found
    assert found.startswith(b"HTTP/1.1 200 " if begins else b"HTTP/1.1 400 ")
    assert found.count(b"HTTP/1.1 ") == 1
    assert seen == (["http.disconnect"] if reads else [])
    assert loud(caplog) == []


def head_of(size: int) -> bytes:
    """Return a request whose head has so many bytes."""
    begun = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: "
    return begun + b"x" * (size - len(begun) - 4) + b"\r\n\r\n"


def test_a_head_has_at_most_16_kib() -> None:
    """431, before the application sees it: in one read, byte by byte, and behind another one."""
    paths: list[str] = []

    async def app(scope: Any, _: Any, send: Any) -> None:
        paths.append(scope["path"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    fits, too_long, longer = head_of(2**14), head_of(2**14 + 1), head_of(20_000)
    with answering(app) as (port, _):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(fits)
            assert client.recv(4096).startswith(b"HTTP/1.1 204 ")
            for byte in fits:
                client.sendall(bytes((byte,)))
            assert client.recv(4096).startswith(b"HTTP/1.1 204 ")
        assert len(paths) == 2
        for sent in (too_long, longer, longer.replace(b"X-Long: ", b"X-Long:" + b" " * 20_000)):
            found = told(port, sent)
            assert found.startswith(b"HTTP/1.1 431 "), found
            assert b"16384" in found
        assert len(paths) == 2
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(ConnectionError):
                for byte in too_long:
                    client.sendall(bytes((byte,)))
            assert client.recv(4096).startswith(b"HTTP/1.1 431 ")
        found = told(port, GOOD + longer)
        assert [found.count(b"HTTP/1.1 %d " % status) for status in (204, 431)] == [1, 1]
        assert len(paths) == 3
