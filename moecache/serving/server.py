"""The sockets: bounded connections, none idle for long, and an end that loses no answer."""

import asyncio
import contextlib
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from moecache.errors import ConfigError
from moecache.serving.errors import error_body

MOST_CONNECTIONS = 128
# For the head of a request, from its first byte or the connection on.
HEAD_S = 10.0
HEAD_BYTES = 16 * 1024
# Time for a client that does not read its answer.
_UNREAD_S = 30.0
_KEEP_ALIVE_S = 10
_LAST_WORDS_S = 1.0
# For the answers that say that the server ends, before what is left of its connections is cut.
_HANG_UP_S = 0.5
_FORCE_S = 0.1
_WATCH_S = 2.0


def _answer(status: bytes, message: str) -> bytes:
    body = json.dumps(error_body(int(status[:3]), message)).encode()
    again = b"retry-after: 5\r\n" if status.startswith((b"408", b"503")) else b""
    return b"HTTP/1.1 %s\r\nconnection: close\r\n%s" % (status, again) + (
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    )


# Written where no request has been read.
_FULL = _answer(
    b"503 Service Unavailable", f"more than {MOST_CONNECTIONS} connections; ask again in 5 s"
)
_SLOW = _answer(b"408 Request Timeout", f"no request came in {HEAD_S:.0f} s; send it again")
_BROKEN = _answer(b"400 Bad Request", "what came is no request of HTTP/1.1; nothing was done")
_LONG = _answer(
    b"431 Request Header Fields Too Large",
    f"the head of the request has more than {HEAD_BYTES} bytes; send fewer or shorter headers",
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Ending(Protocol):
    """What has to end with a server: an engine, or the front that comes before it."""

    def drain(self) -> None:
        """Refuse what waits and what comes."""

    async def stop(self) -> None:
        """End what is being generated."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address.

    Taken before a model is loaded, which takes minutes: a port that is taken is known at once.

    Raises
    ------
    ConfigError
        If it cannot be had.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"a port is a number from 0 to 65535, got {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(MOST_CONNECTIONS)
        except BaseException:
            bound.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"port {port} of {host} cannot be served: {reason}; choose another, or 0 for any that "
            "is free"
        ) from error
    return bound


class Server(uvicorn.Server):
    """Serves an application until it is asked to end, in a thread of its own.

    Within `signals_taken`, SIGTERM and SIGINT have the answer that is being generated finished
    and refuse all others. A second SIGINT ends that one, too; more change nothing.

    Parameters
    ----------
    app : ASGI application
    engine : Ending
        The engine of the same application, or its front; the caller closes it.
    watch : callable (), optional
        Called every few seconds in a thread of its own; its error ends the server.
    verbose : bool, default False
        Log each request, and what is wrong with some.

    Attributes
    ----------
    error : BaseException or None
        The error that `watch` raised, or that ended the server.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine: Ending,
        *,
        watch: Callable[[], object] | None = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Connection,
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                # A stranger's request is no reason to write a line.
                log_level="info" if verbose else "error",
                access_log=verbose,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                backlog=MOST_CONNECTIONS,
            )
        )
        self._engine = engine
        self._watch = watch
        self._watching: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._has_begun = threading.Event()
        self.error: BaseException | None = None

    def start(self, bound: socket.socket) -> None:
        """Serve a socket from now on, in a thread that ends with `close`; return once it answers.

        Raises
        ------
        OSError
            If it cannot be served.
        """
        # A daemon: an interrupt that comes right here leaves nobody who could end it.
        self._thread = threading.Thread(
            target=self._serve_in_thread, args=(bound,), name="moecache-server", daemon=True
        )
        self._thread.start()
        self._has_begun.wait()
        self._raise_error()

    def wait(self) -> None:
        """Return once the server has ended, by a signal; raise the error if it is one that did."""
        assert self._thread is not None
        self._thread.join()
        self._raise_error()

    def close(self) -> None:
        """End the server at once, if it has not ended; no thread is left."""
        self.should_exit = self.force_exit = True
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def _serve_in_thread(self, bound: socket.socket) -> None:
        try:
            self.run([bound])
        except BaseException as error:  # noqa: BLE001 - the starting thread's to raise
            self.error = error
        finally:
            self._has_begun.set()

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer from now on, and look after what is needed for it."""
        await super().startup(sockets)
        if self._watch is not None:
            self._watching = asyncio.create_task(self._look(self._watch))
        self._has_begun.set()

    async def _look(self, watch: Callable[[], object]) -> None:
        """End the server once what it needs is gone."""
        while self.error is None:
            await asyncio.sleep(_WATCH_S)
            try:
                await asyncio.to_thread(watch)
            except Exception as error:  # noqa: BLE001 - the caller's to judge
                self.error = error
        self._engine.drain()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what is being generated, refuse what waits, and close."""
        self._engine.drain()
        if self._watching is not None:
            self._watching.cancel()
        forcing = asyncio.create_task(self._force())
        await super().shutdown(sockets)
        # After a second signal there may still be an answer, and a client to be told so.
        await self._engine.stop()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_LAST_WORDS_S)
        forcing.cancel()

    async def _force(self) -> None:
        """End the answers once that is asked for, and cut clients that send or do not read."""
        while not self.force_exit:  # noqa: ASYNC110 - uvicorn sets it, in a signal
            await asyncio.sleep(_FORCE_S)
        # From Python 3.12 on, uvicorn itself waits for all connections.
        await self._engine.stop()
        await asyncio.sleep(_HANG_UP_S)
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    @contextlib.contextmanager
    def signals_taken(self) -> Iterator[None]:
        """Have signals end the server, and not what is done before and after it has run.

        Afterwards they are ignored: the process is about to end, with an exit code of its own.
        """
        for number in _SIGNALS:
            signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals as they are; uvicorn would take them, and raise them again afterwards."""
        yield


class _Requests(h11.Connection):
    """The requests of a connection, whose heads have an end.

    h11 compares with its bound only what is incomplete: a long head that comes in one read passes.

    Attributes
    ----------
    is_head_long : bool
        Why `next_event` raised.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES)
        self.is_head_long = False

    def next_event(self) -> Any:
        """Return what comes next; a RemoteProtocolError if it is no HTTP, or a head too long."""
        if self.their_state is not h11.IDLE:
            return super().next_event()
        before = len(self.trailing_data[0])
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.is_head_long = error.error_status_hint == 431
            raise
        if before - len(self.trailing_data[0]) > HEAD_BYTES:
            self.is_head_long = True
            raise h11.RemoteProtocolError("the head is too long", error_status_hint=431)
        return event


class _Connection(H11Protocol):
    """A connection that is closed if its client is slow to ask, or to read, or speaks no HTTP."""

    conn: _Requests

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _Requests()
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.write(_FULL)
            transport.close()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        for timer in (self._head_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        # Nothing is asked any more after a request with which the connection ends.
        if self.conn.their_state is not h11.MUST_CLOSE:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn passes it
        """Close the connection, as what came is no HTTP; the application sends nothing on it.

        h11 would refuse an error in the midst of an answer, and the answer behind an error.
        """
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_LONG if self.conn.is_head_long else _BROKEN)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def shutdown(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(_UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def timeout_keep_alive_handler(self) -> None:
        # A close would wait for the client to read the rest.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _watch(self) -> None:
        """Set the clock while the head of a request is waited for."""
        waits = self.cycle is None or self.cycle.response_complete
        if not waits and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        elif waits and self._head_timer is None and self.timeout_keep_alive_task is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._end_slow)

    def _end_slow(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(_SLOW)
            self.transport.close()
