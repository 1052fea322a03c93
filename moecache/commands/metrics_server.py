"""MetricsServer: Prometheus metrics over HTTP, to few clients at once and to none for long."""

import contextlib
import logging
import socket
import sys
import time
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler

logger = logging.getLogger(__name__)

_MOST_CLIENTS = 16
# Time to ask and to read the answer, which takes milliseconds.
_CLIENT_S = 10


class MetricsServer(ThreadingHTTPServer):
    """Serve a registry on this machine alone.

    A client has 10 s to ask and to read the answer. One client too many takes the place of the one
    that has been there longest: clients that hold a connection and say nothing keep no other out.

    Parameters
    ----------
    port : int
        0 for any that is free.
    registry : CollectorRegistry

    Raises
    ------
    OSError
        If the port is taken.
    """

    # With the usual 5, clients that come in a crowd wait for seconds.
    request_queue_size = 128

    def __init__(self, port: int, registry: CollectorRegistry) -> None:
        # When each client came, the first one first.
        self._since_s: dict[Any, float] = {}
        super().__init__(("127.0.0.1", port), MetricsHandler.factory(registry))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin to answer a client in a thread of its own."""
        if len(self._since_s) >= _MOST_CLIENTS:
            self._hang_up(next(iter(self._since_s)))
        self._since_s[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Hang up on clients that take too long, a few times a second."""
        before_s = time.monotonic() - _CLIENT_S
        for request, since_s in list(self._since_s.items()):
            if since_s < before_s:
                self._hang_up(request)

    def shutdown_request(self, request: Any) -> None:
        """Forget a client that was answered."""
        self._since_s.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - inherited
        """Note a client that went away, or was hung up on."""
        logger.debug("metrics.client_failed address=%s error=%r", client_address, sys.exception())

    def _hang_up(self, request: Any) -> None:
        self._since_s.pop(request, None)
        # Its thread reads the end of the connection, and closes it.
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)
