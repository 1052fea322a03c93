"""Prometheus metrics over HTTP: served, and read again."""

import contextlib
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import Any

from moecache.commands.paths import printable
from moecache.commands.samples import Sample, sample_metrics
from moecache.errors import ConfigError, MoeCacheError
from moecache.runtime.runtime import ExpertRuntime
from moecache.telemetry import PrometheusCollector, check_prometheus

_TIMEOUT_S = 10
_POLL_S = 0.2
_MOST_BYTES = 16 * 2**20
_PART_BYTES = 64 * 1024


@contextlib.contextmanager
def served(
    runtime: ExpertRuntime, port: int, labels: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Serve a runtime's metrics on this machine alone; give the URL.

    Parameters
    ----------
    runtime : ExpertRuntime
    port : int
        0 for any that is free.
    labels : mapping of str to str, optional
        As for `PrometheusCollector`.

    Raises
    ------
    ConfigError
        If this is not a port, or it is taken.
    MissingDependencyError
        If prometheus_client is not installed.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"a port is a number from 0 to 65535, got {port}")
    collector = PrometheusCollector(runtime, per_layer=True, labels=labels)
    from prometheus_client import CollectorRegistry

    from moecache.commands.metrics_server import MetricsServer

    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server = MetricsServer(port, registry)
    except OSError as error:
        raise ConfigError(
            f"port {port} of 127.0.0.1 cannot be served: {error.strerror}; choose another, or 0 "
            "for any that is free"
        ) from error
    thread = threading.Thread(
        target=server.serve_forever, args=(_POLL_S,), name="moecache-metrics", daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def metrics_url(text: str) -> str:
    """Return the whole URL: http and /metrics are added where they were left out.

    Raises
    ------
    ConfigError
        If it is no URL of http or https, or only a number: a process id is no address.
    """
    if "@" in text:
        # The URL is not repeated: the part before the @ may be a password.
        raise ConfigError(
            "a URL of metrics has no @: a user and a password cannot be given; write for example "
            "http://localhost:9100/metrics"
        )
    url = text if "://" in text else f"http://{text}"
    if not url.isascii():
        raise ConfigError(
            f"{printable(text)!r} has letters beyond ASCII; write the host as xn--..., and the "
            "rest as %XX"
        )
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname or ""
        known = parts.scheme in {"http", "https"} and host and parts.port != 0
        known = known and not (host.isdigit() and text == host)
    except ValueError:
        known = False
    if not known or any(not c.isprintable() or c.isspace() for c in url):
        raise ConfigError(
            f"{text!r} is no http:// address of metrics; write for example "
            "http://localhost:9100/metrics"
        )
    path = parts.path if parts.path not in {"", "/"} else "/metrics"
    return urllib.parse.urlunsplit(parts._replace(path=path))


def read_metrics(url: str) -> Sample:
    """Return what a server says of its runtimes.

    Raises
    ------
    MoeCacheError
        If there is no answer, or none with a runtime's metrics.
    MissingDependencyError
        If prometheus_client is not installed: its parser is used.
    """
    check_prometheus()
    # These take a tenth of a command's start, and only this command needs them.
    import http.client
    import urllib.error

    from prometheus_client.parser import text_string_to_metric_families

    shown = printable(url)
    try:
        body = _fetch(url)
    except urllib.error.HTTPError as error:
        error.close()
        raise MoeCacheError(
            f"{shown}: answers {error.code}; is this the path of the metrics?"
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        text = getattr(reason, "strerror", None) or reason or type(reason).__name__
        raise MoeCacheError(
            f"{shown}: no answer: {text}; does the server run, and are its metrics served there?"
        ) from error
    taken_s = time.monotonic()
    if len(body) > _MOST_BYTES:
        raise MoeCacheError(f"{shown}: answers more than 16 MiB; is this a page of metrics?")
    try:
        sample = sample_metrics(text_string_to_metric_families(body.decode()), taken_s)
    except (ValueError, LookupError, AttributeError) as error:
        raise MoeCacheError(
            f"{shown}: what is there is no Prometheus text; is this the path of the metrics?"
        ) from error
    if sample is None:
        raise MoeCacheError(
            f"{shown}: has no metrics of an open moecache runtime; register "
            "moecache.telemetry.PrometheusCollector(runtime) there"
        )
    return sample


def _fetch(url: str) -> bytes:
    """Return the whole answer, or more than `_MOST_BYTES` of it.

    Raises
    ------
    TimeoutError
        If not all of it is there in time, however steadily single bytes come.
    MoeCacheError
        If the server points to another scheme, or ends its answer early.
    OSError, HTTPException, ValueError
        As urllib raises them.
    """
    import urllib.request

    class SameScheme(urllib.request.HTTPRedirectHandler):
        """Follow redirects, but only to addresses that can be typed as well."""

        def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
            target = headers.get("location") or headers.get("uri") or ""
            place = urllib.parse.urlsplit(urllib.parse.urljoin(req.full_url, target))
            if place.scheme != req.type:
                fp.close()
                raise MoeCacheError(
                    f"{printable(url)}: redirects to {printable(place.geturl())[:200]}, which is "
                    f"not {req.type}; give the address of the metrics themselves"
                )
            return super().http_error_302(req, fp, code, msg, headers)

        http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    until_s = time.monotonic() + _TIMEOUT_S
    opener = urllib.request.build_opener(SameScheme)
    found: SimpleQueue[bytes | BaseException] = SimpleQueue()

    def fetch() -> None:
        body = bytearray()
        try:
            # The scheme is checked by `metrics_url`.
            request = urllib.request.Request(url, headers={"Accept": "text/plain"})  # noqa: S310
            with opener.open(request, timeout=_TIMEOUT_S) as answer:
                while len(body) <= _MOST_BYTES and (part := answer.read1(_PART_BYTES)):
                    body += part
                    if time.monotonic() > until_s:  # no thread waits for the rest
                        return
                if answer.length and len(body) <= _MOST_BYTES:
                    raise MoeCacheError(
                        f"{printable(url)}: the answer ends after {len(body)} bytes, "
                        f"{answer.length} before its end; try again"
                    )
            found.put(bytes(body))
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            found.put(error)

    # urllib's own timeout is per receive, and a header may come letter by letter.
    threading.Thread(target=fetch, name="moecache-top-fetch", daemon=True).start()
    try:
        answer = found.get(timeout=_TIMEOUT_S)
    except Empty:
        raise TimeoutError(f"not all of it came in {_TIMEOUT_S} s") from None
    if isinstance(answer, BaseException):
        raise answer
    return answer
