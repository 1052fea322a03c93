"""RequestError: why a request is not answered, as its client is told."""

from typing import Any

# Where Anthropic's protocol is.
MESSAGES = "/v1/messages"


class RequestError(Exception):
    """A request that is refused; nothing was generated for it.

    Parameters
    ----------
    status : int
        The status of HTTP.
    message : str
        The request, the finding, and the remedy.
    param : str, optional
        The field of the request that it is about.
    code : str, optional
        OpenAI's word for the kind of error, where there is one.
    headers : dict of str to str, optional
        More headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}


def ending() -> RequestError:
    """Return the error of a request that comes, or waits, as the server ends."""
    return RequestError(503, "the server ends; ask another one", headers={"Retry-After": "30"})


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error in the shape that clients of OpenAI know."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def message_error(status: int, message: str) -> dict[str, Any]:
    """Return an error in the shape that clients of Anthropic know."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    kinds |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
    kind = kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def body_at(
    path: str, status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error in the shape of the protocol that is spoken at a path."""
    if path.startswith(MESSAGES):
        return message_error(status, message)
    return error_body(status, message, param, code)
