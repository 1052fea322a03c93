"""The routes: OpenAI's protocol and Anthropic's, health and metrics, and the page."""

import functools
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moecache.serving.basics import ERROR_HANDLERS, basic_routes, metrics_of, readiness
from moecache.serving.bodies import Bodies
from moecache.serving.completions import Completions
from moecache.serving.engine import Engine
from moecache.serving.errors import MESSAGES, RequestError
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
    bodies = Bodies()
    registry = CollectorRegistry()
    labels = {} if engine.runtime.share is None else {"rank": str(engine.runtime.share.rank)}
    registry.register(PrometheusCollector(engine.runtime, per_layer=True, labels=labels))
    registry.register(_Collector(engine))

    def completions(*, chat: bool) -> Completions:
        return Completions(engine, bodies, functools.partial(read_request, chat=chat), Reply)

    async def health(_: Request) -> Response:
        if engine.draining:
            return JSONResponse({"status": "ending"}, 503)
        return JSONResponse({"status": "ok", "waiting": engine.num_waiting})

    async def metrics(_: Request) -> Response:
        return metrics_of(registry)

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
            *basic_routes(engine.names, max_model_len=engine.context_tokens),
            Route("/health", health),
            Route("/readyz", health),
            Route("/metrics", metrics),
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
        exception_handlers=ERROR_HANDLERS,
    )


class _Collector:
    """The server's own counters, for Prometheus."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Any]:
        """Yield the metrics at this moment."""
        totals = self._engine.totals
        yield readiness(is_ready=not self._engine.draining)
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
