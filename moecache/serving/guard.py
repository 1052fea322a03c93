"""Guard: which requests may come in at all."""

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from moecache.serving.errors import body_at

# Paths that show nothing of the model: a page without figures, and the server's health.
_OPEN_PATHS = ("/", "/health", "/livez", "/readyz")


class Guard:
    """Lets requests through that have the key, and none that another site's page made.

    A browser sends what any page asks it to, also to this machine. Such a request says where
    it is from (`Origin`), or, if that site's name now leads here, has its name as `Host`.

    Parameters
    ----------
    app : ASGI application
    key : str, optional
        The key that clients send as `Authorization: Bearer`, or as `X-Api-Key`.
    host : str
        The address that is served.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, host: str) -> None:
        self._app = app
        self._key = None if key is None else key.encode()
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        status, message = self._refusal(headers, scope["path"])
        if status is None:
            await self._app(scope, receive, send)
            return
        more = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        # The body, which may be long, is not read.
        response = JSONResponse(
            body_at(
                scope["path"],
                status,
                message,
                code="invalid_api_key" if status == 401 else None,
            ),
            status,
            {**more, "Connection": "close"},
        )
        await response(scope, receive, send)

    def _refusal(self, headers: Headers, path: str) -> tuple[int | None, str]:
        host = headers.get("host", "")
        name = _name(f"//{host}")
        if is_loopback(self._host) and name is not None and not is_loopback(name):
            return (
                403,
                f"the host {host!r} is not this machine; ask 127.0.0.1, or serve with --host",
            )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, f"pages of {origin!r} may not ask; have their server do it"
        if self._key is not None and path not in _OPEN_PATHS:
            kind, _, bearer = headers.get("authorization", "").partition(" ")
            given = [headers.get("x-api-key", "")] + [bearer] * (kind.lower() == "bearer")
            # How long this takes does not depend on how much of the key is right.
            same = [hmac.compare_digest(one.strip().encode(), self._key) for one in given]
            if not any(same):
                return 401, "the API key is missing or wrong; send Authorization: Bearer KEY"
        return None, ""


def is_loopback(host: str) -> bool:
    """Return whether an address or a name is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _name(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return ""
