"""Front: answers from the first moment on, while a model is loaded, and then by its engine."""

import asyncio
import concurrent.futures
import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moecache.serving.basics import ERROR_HANDLERS, basic_routes, metrics_of, readiness
from moecache.serving.bodies import Bodies, disconnected
from moecache.serving.errors import RequestError, ending
from moecache.serving.guard import Guard
from moecache.serving.server import Ending
from moecache.telemetry.loading import Loading

_MOST_WAIT_S = 3600
# RFC 7240: a preference, the first of its name counts.
_WAIT = re.compile(r'(?:^|,)\s*wait\s*=\s*"?(\d{1,9})(?!\d)', re.ASCII | re.IGNORECASE)


class Front:
    """An ASGI application that knows a model's name before it has the model.

    Until `open` it says what is alive, how far the model has come, and refuses requests that need
    it with status 503, or has them wait if they say `Prefer: wait=SECONDS`. From `open` on all
    goes to the engine's application. Nothing here imports torch. Called in the event loop, but
    for `open`.

    Parameters
    ----------
    names : tuple of str
        Names by which clients may call the model; the first is its own.
    loading : Loading
    key : str, optional
        The key that clients must send.
    host : str, default "127.0.0.1"
        The address that is served.
    most_waiting : int, default 16
        Requests that may wait for the model; more are refused.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        loading: Loading,
        *,
        key: str | None = None,
        host: str = "127.0.0.1",
        most_waiting: int = 16,
    ) -> None:
        self._loading = loading
        self._most_waiting = most_waiting
        self._num_waiting = 0
        self._bodies = Bodies()
        self._engine: Ending | None = None
        self._watch: Callable[[], object] | None = None
        # The engine's application; `None` if the server ends before there is one.
        self._opened: concurrent.futures.Future[ASGIApp | None] = concurrent.futures.Future()
        registry = CollectorRegistry()
        registry.register(_Collector(loading))

        async def metrics(_: Request) -> Response:
            return metrics_of(registry)

        self._app = Starlette(
            routes=[
                *basic_routes(names),
                Route("/health", self._health),
                Route("/readyz", self._health),
                # The page asks for it, and shows the phase.
                Route("/v1/moecache/state", self._health),
                Route("/metrics", metrics),
                Mount("/", self._answer_later),
            ],
            middleware=[Middleware(Guard, key=key, host=host)],
            exception_handlers=ERROR_HANDLERS,
        )

    def open(
        self, app: ASGIApp, engine: Ending, *, watch: Callable[[], object] | None = None
    ) -> None:
        """Have an engine's application answer from now on, also those that wait.

        Called by any thread, once. A server that has ended meanwhile asks neither.

        Parameters
        ----------
        app : ASGI application
        engine : Ending
            Its engine.
        watch : callable (), optional
            Called by `look`.
        """
        self._engine, self._watch = engine, watch
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._opened.set_result(app)

    def look(self) -> None:
        """Raise an error if what the engine needs is gone; for the server, in any thread."""
        if self._watch is not None:
            self._watch()

    def drain(self) -> None:
        """Refuse what waits and what comes; the answers that are being generated go on."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._opened.set_result(None)
        if self._engine is not None:
            self._engine.drain()

    async def stop(self) -> None:
        """End the answers that are being generated."""
        if self._engine is not None:
            await self._engine.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        app = self._opened.result() if self._opened.done() else None
        await (app or self._app)(scope, receive, send)

    async def _answer_later(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that needs the model, if its client waits that long.

        Raises
        ------
        RequestError
            If it does not, or too many do, or the server ends.
        """
        body, app = None, None
        # Read also if it is refused: a connection that is closed before would be an error of its
        # own to a client that is still sending.
        with contextlib.suppress(ClientDisconnect):
            async with self._bodies.held(scope, receive) as body:
                app = await self._wait(_wait_of(Headers(scope=scope)), receive)
        if body is None or app is None:
            return
        given: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def again() -> Message:
            return given.pop() if given else await receive()

        await app(scope, again, send)

    async def _wait(self, most_s: int, receive: Receive) -> ASGIApp | None:
        """Return the engine's application once there is one; `None` if the client has left."""
        if most_s and not self._opened.done():
            if self._num_waiting >= self._most_waiting:
                raise self._refusal(f"{self._num_waiting} requests wait for the model already")
            self._num_waiting += 1
            gone = asyncio.ensure_future(disconnected(receive))
            try:
                # Not cancelled afterwards, which would cancel what all wait for.
                opened = asyncio.wrap_future(self._opened)
                await asyncio.wait(
                    (gone, opened), timeout=most_s, return_when=asyncio.FIRST_COMPLETED
                )
                if gone.done():
                    return None
            finally:
                self._num_waiting -= 1
                gone.cancel()
        if not self._opened.done():
            raise self._refusal("the model is being loaded")
        app = self._opened.result()
        if app is None:
            raise ending()
        return app

    def _refusal(self, why: str) -> RequestError:
        figures, retry_s = self._loading.figures(), self._loading.retry_s()
        return RequestError(
            503,
            f"{why} ({figures['phase']}, {figures['seconds']:.0f} s so far); ask again in "
            f"{retry_s} s, or say how long you wait: Prefer: wait=SECONDS",
            code="model_loading",
            headers={"Retry-After": str(retry_s)},
        )

    async def _health(self, _: Request) -> Response:
        if self._opened.done() and self._opened.result() is None:
            return JSONResponse({"status": "ending"}, 503)
        # What clients of llama-server know.
        error = {"code": 503, "message": "Loading model", "type": "unavailable_error"}
        figures = self._loading.figures()
        waiting = self._num_waiting
        return JSONResponse(
            {"error": error, "status": "loading", "waiting": waiting, "loading": figures},
            503,
            {"Cache-Control": "no-store", "Retry-After": str(self._loading.retry_s())},
        )


def _wait_of(headers: Headers) -> int:
    """Return for how many seconds a client would wait."""
    found = _WAIT.search(",".join(headers.getlist("prefer")))
    return 0 if found is None else min(_MOST_WAIT_S, int(found[1]))


class _Collector:
    """What Prometheus is told while a model is loaded."""

    def __init__(self, loading: Loading) -> None:
        self._loading = loading

    def collect(self) -> Iterator[Any]:
        """Yield the metrics at this moment."""
        figures = self._loading.figures()
        yield readiness(is_ready=False)
        yield GaugeMetricFamily(
            "moecache_loading_seconds", "Seconds since the model's load began.", figures["seconds"]
        )
        for name in ("done_bytes", "total_bytes"):
            if figures[name] is not None:
                words = f"Bytes of the phase of the load, {name[:-6]}."
                yield GaugeMetricFamily(f"moecache_loading_{name}", words, figures[name])
