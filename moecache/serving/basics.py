"""Routes and errors that need no model: the page, liveness, the model's name."""

import time
from importlib.resources import files
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from moecache.serving.errors import RequestError, body_at

# Nothing is loaded from elsewhere, and no other site shows the page in a frame.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def basic_routes(names: tuple[str, ...], **known: Any) -> list[Route]:
    """Return the routes that answer alike before a model is loaded and afterwards.

    Parameters
    ----------
    names : tuple of str
        Names by which clients may call the model; the first is its own.
    **known
        More that `/v1/models` says of it.
    """
    page = files("moecache.serving").joinpath("page.html").read_text(encoding="utf-8")
    entry = {"object": "model", "created": int(time.time()), "owned_by": "moecache", **known}

    async def show_page(_: Request) -> Response:
        return HTMLResponse(page, headers=_PAGE_HEADERS)

    async def live(_: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": names[0], **entry}]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in names:
            raise RequestError(
                404, f"the model {name!r} is not served here", code="model_not_found"
            )
        return JSONResponse({"id": names[0], **entry})

    return [
        Route("/", show_page),
        Route("/livez", live),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]


def metrics_of(registry: CollectorRegistry) -> Response:
    """Return the metrics at this moment, as Prometheus reads them."""
    return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def readiness(*, is_ready: bool) -> GaugeMetricFamily:
    """Return the metric that says whether the model can answer."""
    return GaugeMetricFamily("moecache_ready", "1 once the model can answer.", int(is_ready))


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


# Of a Starlette application.
ERROR_HANDLERS: dict[Any, Any] = {
    RequestError: _refused,
    HTTPException: _refused,
    Exception: _failed,
}
