"""Bodies of requests: bounded in size, in time, and in what all of them take."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from moecache.serving.errors import RequestError

# Room for a context of 262,144 tokens of English.
MOST_BYTES = 2 * 2**20
MOST_HELD_BYTES = 32 * 2**20
BODY_S = 20.0
# A client that is still sending would not read the answer: its bytes are dropped for a while.
_DROP_S = 10.0


class Bodies:
    """Reads bodies of requests.

    Attributes
    ----------
    held_bytes : int
        Memory of the bodies that are read, or used, at this moment.
    """

    def __init__(self) -> None:
        self.held_bytes = 0

    @contextlib.asynccontextmanager
    async def held(self, scope: Scope, receive: Receive) -> AsyncIterator[bytearray]:
        """Give the body of a request, which counts until the block ends.

        Raises
        ------
        RequestError
            If it is too long, takes too long, is compressed, or others take all the room.
        ClientDisconnect
            If the client leaves.
        """
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_S):
                    await self._read(scope, receive, body)
            except TimeoutError:
                raise _refusal(
                    408, f"the request did not come in {BODY_S:.0f} s; send it again"
                ) from None
            yield body
        finally:
            self.held_bytes -= len(body)

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> None:
        headers = dict(scope["headers"])
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding.strip().lower() != "identity":
            raise _refusal(415, f"the request is encoded as {encoding!r}; send it as it is")
        # h11 lets only digits pass.
        length = int(headers.get(b"content-length", b"0"))
        if length <= MOST_BYTES:
            async for part in _parts(receive):
                body += part
                self.held_bytes += len(part)
                if len(body) > MOST_BYTES:
                    break
                if self.held_bytes > MOST_HELD_BYTES:
                    raise _refusal(503, "other requests take all the room; ask again in 5 s", "5")
            else:
                return
        await _drop(receive)
        what = f"{length} bytes" if length else f"more than {MOST_BYTES} bytes"
        raise _refusal(
            413, f"the request has {what}; send a shorter conversation, of {MOST_BYTES} at most"
        )


async def disconnected(receive: Receive) -> None:
    """Return once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _drop(receive: Receive) -> None:
    until_s = time.monotonic() + _DROP_S
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DROP_S):
            async for _ in _parts(receive):
                # The timeout comes only where something is waited for.
                if time.monotonic() > until_s:
                    return


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        yield message.get("body", b"")
        more = message.get("more_body", False)


def _refusal(status: int, message: str, retry_s: str = "") -> RequestError:
    more = {"Retry-After": retry_s} if retry_s else {}
    return RequestError(status, message, headers={"Connection": "close", **more})
