"""Bodies of requests: bounded in size, in time, and in how many are held at once."""

import asyncio
import time
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from moecache.serving.errors import RequestError

MOST_BYTES = 4 * 2**20
# Bodies that are held at the same time: with the bound above, the most memory they take.
_MOST_AT_ONCE = 8
BODY_S = 20.0
# A client that is still sending would not read the answer: what it sends is dropped for a while.
_DROP_S = 2.0


class Bodies:
    """Reads bodies of requests."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(_MOST_AT_ONCE)

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body of a request.

        Raises
        ------
        RequestError
            If it is too long, or takes too long.
        ClientDisconnect
            If the client leaves.
        """
        try:
            async with asyncio.timeout(BODY_S), self._room:
                return await _read(scope, receive)
        except TimeoutError:
            raise RequestError(
                408,
                f"the request did not come in {BODY_S:.0f} s; send it again",
                headers={"Connection": "close"},
            ) from None


async def _read(scope: Scope, receive: Receive) -> bytes:
    length = dict(scope["headers"]).get(b"content-length", b"0")
    # h11 lets only digits pass.
    if int(length) > MOST_BYTES:
        await _drop(receive)
        raise _too_long(f"{int(length)} bytes")
    body = bytearray()
    async for part in _parts(receive):
        body += part
        if len(body) > MOST_BYTES:
            await _drop(receive)
            raise _too_long(f"more than {MOST_BYTES} bytes")
    return bytes(body)


async def _drop(receive: Receive) -> None:
    until_s = time.monotonic() + _DROP_S
    try:
        async with asyncio.timeout(_DROP_S):
            async for _ in _parts(receive):
                if time.monotonic() > until_s:
                    return
    except TimeoutError:
        return


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        yield message.get("body", b"")
        more = message.get("more_body", False)


def _too_long(what: str) -> RequestError:
    return RequestError(
        413,
        f"the request has {what}, more than {MOST_BYTES}; send a shorter conversation",
        headers={"Connection": "close"},
    )
