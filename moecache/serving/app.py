"""The routes: OpenAI's protocol, health and metrics, and the page."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from moecache.errors import MoeCacheError
from moecache.serving.answer import Answer
from moecache.serving.bodies import Bodies
from moecache.serving.engine import Engine
from moecache.serving.errors import RequestError, error_body
from moecache.serving.guard import Guard
from moecache.serving.replies import SIGN_OF_LIFE, Reply, event
from moecache.serving.state import snapshot
from moecache.telemetry import PrometheusCollector

# Errors that a model may raise; any other is a mistake of this server, logged with its trace.
FAILURES = (MoeCacheError, OSError, MemoryError, RuntimeError, ValueError)
_CUT_OFF = "the server ended before the answer did; ask again"
# Nothing is loaded from elsewhere, and no other site shows the page in a frame.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # nginx would hold parts back.
    (b"x-accel-buffering", b"no"),
]


def build_app(engine: Engine, *, key: str | None = None, host: str = "127.0.0.1") -> Starlette:
    """Return the ASGI application of an engine.

    Parameters
    ----------
    engine : Engine
    key : str, optional
        The key that clients must send as `Authorization: Bearer`.
    host : str, default "127.0.0.1"
        The address that is served.
    """
    bodies, begun = Bodies(), int(time.time())
    registry = CollectorRegistry()
    labels = {} if engine.runtime.share is None else {"rank": str(engine.runtime.share.rank)}
    registry.register(PrometheusCollector(engine.runtime, per_layer=True, labels=labels))
    registry.register(_Collector(engine))
    page = files("moecache.serving").joinpath("page.html").read_text(encoding="utf-8")
    entry = {"object": "model", "created": begun, "owned_by": "moecache"}

    async def show_page(_: Request) -> Response:
        return HTMLResponse(page, headers=_PAGE_HEADERS)

    async def health(_: Request) -> Response:
        if engine.draining:
            return JSONResponse({"status": "ending"}, 503)
        return JSONResponse({"status": "ok", "waiting": engine.num_waiting})

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": engine.names[0], **entry}]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in engine.names:
            raise RequestError(
                404, f"the model {name!r} is not served here", code="model_not_found"
            )
        return JSONResponse({"id": engine.names[0], **entry})

    async def state(_: Request) -> Response:
        return JSONResponse(snapshot(engine), headers={"Cache-Control": "no-store"})

    return Starlette(
        routes=[
            Route("/", show_page),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/moecache/state", state),
            Route(
                "/v1/chat/completions", _Completions(engine, bodies, chat=True), methods=["POST"]
            ),
            Route("/v1/completions", _Completions(engine, bodies, chat=False), methods=["POST"]),
        ],
        middleware=[Middleware(Guard, key=key, host=host)],
        exception_handlers={
            RequestError: _refused,
            HTTPException: _refused,
            Exception: _failed,
        },
    )


class _Completions:
    """Answers completions, whole or in parts; an ASGI application."""

    def __init__(self, engine: Engine, bodies: Bodies, *, chat: bool) -> None:
        self._engine = engine
        self._bodies = bodies
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; one whose client leaves is not answered, and not generated on."""
        engine = self._engine
        with contextlib.ExitStack() as stack:
            try:
                async with self._bodies.held(scope, receive) as body:
                    gone = asyncio.ensure_future(_disconnected(receive))
                    stack.callback(gone.cancel)
                    read = await engine.read(body, chat=self._chat, gone=gone)
            except ClientDisconnect:
                return
            # Nothing is awaited in between, so the place in the queue is kept.
            answer = None if read is None else await engine.begin(*read, gone)
            if answer is None:
                return
            stack.callback(answer.stop)
            await self._send(answer, scope, receive, send)

    async def _send(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(answer.asked, self._engine.names[0])
        if answer.asked.stream:
            await _send_parts(answer, reply, send)
            return
        try:
            text = "".join([part async for part in answer.parts()])
        except FAILURES as error:
            raise RequestError(500, f"the model failed: {error}") from error
        if answer.cost is None:
            # Nobody reads this if it is the client that has left.
            raise RequestError(503, _CUT_OFF)
        await JSONResponse(reply.whole(text, answer.cost))(scope, receive, send)


async def _send_parts(answer: Answer, reply: Reply, send: Send) -> None:
    async def write(body: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})

    await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
    if first := reply.first():
        await write(first)
    try:
        async for part in answer.parts():
            await write(reply.part(part) if part else SIGN_OF_LIFE)
    except FAILURES as error:
        # The status was sent: the error is an event, and nothing says that the answer is complete.
        await write(event(error_body(500, f"the model failed: {error}")), more=False)
        return
    if answer.cost is None:
        await write(event(error_body(503, _CUT_OFF)), more=False)
    else:
        await write(reply.last(answer.cost), more=False)


async def _disconnected(receive: Receive) -> None:
    """Return once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refused(_: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        body = error_body(error.status, str(error), error.param, error.code)
        return JSONResponse(body, error.status, error.headers)
    assert isinstance(error, HTTPException)
    return JSONResponse(
        error_body(error.status_code, error.detail), error.status_code, error.headers
    )


async def _failed(_: Request, error: Exception) -> Response:
    return JSONResponse(error_body(500, f"the server failed: {type(error).__name__}"), 500)


class _Collector:
    """The server's own counters, for Prometheus."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Any]:
        """Yield the metrics at this moment."""
        totals = self._engine.totals
        requests = CounterMetricFamily(
            "moecache_requests",
            "Completions asked for, by what became of them.",
            labels=["outcome"],
        )
        for outcome in ("answered", "refused", "left", "failed"):
            requests.add_metric([outcome], getattr(totals, outcome))
        yield requests
        tokens = CounterMetricFamily(
            "moecache_tokens", "Tokens read as prompts, and generated.", labels=["kind"]
        )
        tokens.add_metric(["prompt"], totals.prompt_tokens)
        tokens.add_metric(["completion"], totals.completion_tokens)
        yield tokens
        yield GaugeMetricFamily(
            "moecache_waiting_requests", "Requests in the queue.", self._engine.num_waiting
        )
        yield GaugeMetricFamily(
            "moecache_generating",
            "Answers that are being generated.",
            len(self._engine.answers),
        )
