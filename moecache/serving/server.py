"""The sockets: bounded connections, none idle for long, and an end that loses no answer."""

import asyncio
import contextlib
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from moecache.errors import ConfigError
from moecache.serving.engine import Engine
from moecache.serving.errors import error_body

MOST_CONNECTIONS = 128
# For the head of a request, from its first byte or the connection on.
HEAD_S = 10.0
# Of a client that does not read what it is sent.
_UNREAD_S = 30.0
_KEEP_ALIVE_S = 10
_LAST_WORDS_S = 1.0
_WATCH_S = 2.0


def _answer(status: bytes, message: str) -> bytes:
    body = json.dumps(error_body(int(status[:3]), message)).encode()
    return b"HTTP/1.1 %s\r\nconnection: close\r\nretry-after: 5\r\n" % status + (
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    )


# Written where no request has been read.
_FULL = _answer(
    b"503 Service Unavailable", f"more than {MOST_CONNECTIONS} connections; ask again in 5 s"
)
_SLOW = _answer(b"408 Request Timeout", f"no request came in {HEAD_S:.0f} s; send it again")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket of this address that does not listen yet.

    Taken before a model is loaded, which takes minutes: a port that is taken is known at once, and
    nobody is let in before there is an answer.

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
    """Serves an application until it is asked to end.

    SIGTERM and SIGINT have the answer that is being generated finished and refuse all others. A
    second SIGINT ends that one, too.

    Parameters
    ----------
    app : Starlette
    engine : Engine
        Of the same application; the caller closes it.
    on_ready : callable (), optional
        Called once clients are let in.
    watch : callable (), optional
        Called every few seconds in a thread of its own; what it raises ends the server.
    verbose : bool, default False
        Log each request, and what is wrong with some.

    Attributes
    ----------
    error : Exception or None
        What `watch` raised.
    """

    def __init__(
        self,
        app: Starlette,
        engine: Engine,
        *,
        on_ready: Callable[[], object] | None = None,
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
                # Whatever strangers send is no reason to write a line.
                log_level="info" if verbose else "error",
                access_log=verbose,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                backlog=MOST_CONNECTIONS,
            )
        )
        self._engine = engine
        self._on_ready = on_ready
        self._watch = watch
        self._watching: asyncio.Task[None] | None = None
        self.error: Exception | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready()
        if self._watch is not None:
            self._watching = asyncio.create_task(self._look(self._watch))

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
        await super().shutdown(sockets)
        # After a second signal there may still be an answer, and a client to be told so.
        await self._engine.stop()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_LAST_WORDS_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Have signals end the server; unlike uvicorn's, they are not raised again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Connection(H11Protocol):
    """A connection that is closed if its client is slow to ask, or to read."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
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

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

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
