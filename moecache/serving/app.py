"""The routes: OpenAI's protocol and Anthropic's, health and metrics, and the page."""

import functools
import time
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from moecache.serving.bodies import Bodies
from moecache.serving.completions import Completions
from moecache.serving.engine import Engine
from moecache.serving.errors import MESSAGES, RequestError, body_at
from moecache.serving.guard import Guard
from moecache.serving.message_replies import MessageReply
from moecache.serving.messages import read_message
from moecache.serving.props import props, slots
from moecache.serving.replies import Reply
from moecache.serving.requests import read_request
from moecache.serving.response_replies import ResponseReply
from moecache.serving.responses import read_response
from moecache.serving.state import snapshot
from moecache.serving.tokens import Tokens, count_tokens, detokenize, tokenize
from moecache.telemetry import PrometheusCollector

# Nothing is loaded from elsewhere, and no other site shows the page in a frame.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


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
    entry: dict[str, Any] = {"object": "model", "created": begun, "owned_by": "moecache"}
    entry["max_model_len"] = engine.context_tokens

    def completions(*, chat: bool) -> Completions:
        return Completions(engine, bodies, functools.partial(read_request, chat=chat), Reply)

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

    async def show_props(_: Request) -> Response:
        return JSONResponse(props(engine))

    async def show_slots(request: Request) -> Response:
        found = slots(engine)
        if "fail_on_no_slot" in request.query_params and all(s["is_processing"] for s in found):
            raise RequestError(
                503, f"all {len(found)} slots are taken; ask again", headers={"Retry-After": "5"}
            )
        return JSONResponse(found, headers={"Cache-Control": "no-store"})

    tokenizing = functools.partial(tokenize, engine.checks.grammars)
    counting = functools.partial(count_tokens, engine)
    messages = Completions(engine, bodies, read_message, MessageReply)
    responses = Completions(engine, bodies, read_response, ResponseReply)
    return Starlette(
        routes=[
            Route("/", show_page),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/moecache/state", state),
            Route("/props", show_props),
            Route("/slots", show_slots),
            Route("/tokenize", Tokens(engine, bodies, tokenizing), methods=["POST"]),
            Route("/detokenize", Tokens(engine, bodies, detokenize), methods=["POST"]),
            Route("/v1/chat/completions", completions(chat=True), methods=["POST"]),
            Route("/v1/completions", completions(chat=False), methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            Route(MESSAGES, messages, methods=["POST"]),
            Route(f"{MESSAGES}/count_tokens", Tokens(engine, bodies, counting), methods=["POST"]),
        ],
        middleware=[Middleware(Guard, key=key, host=host)],
        exception_handlers={
            RequestError: _refused,
            HTTPException: _refused,
            Exception: _failed,
        },
    )


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        body = body_at(request.url.path, error.status, str(error), error.param, error.code)
        return JSONResponse(body, error.status, error.headers)
    assert isinstance(error, HTTPException)
    message, path = error.detail, request.url.path[:80]
    if error.status_code == 404:
        message = f"{path} is not served here; chats are at /v1/chat/completions"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{path} takes no {request.method}; send {allowed}"
    body = body_at(request.url.path, error.status_code, message)
    return JSONResponse(body, error.status_code, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    body = body_at(request.url.path, 500, f"the server failed: {type(error).__name__}")
    return JSONResponse(body, 500)


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
