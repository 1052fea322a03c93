"""Prometheus metrics over HTTP: served, and read again."""

import contextlib
import time
import urllib.parse
from collections.abc import Iterator

from moecache.commands.paths import printable
from moecache.commands.samples import Sample, sample_metrics
from moecache.errors import ConfigError, MoeCacheError
from moecache.runtime import ExpertRuntime
from moecache.telemetry import PrometheusCollector, check_prometheus

_TIMEOUT_S = 10
_MOST_BYTES = 16 * 2**20


@contextlib.contextmanager
def served(runtime: ExpertRuntime, port: int) -> Iterator[str]:
    """Serve a runtime's metrics on this machine alone; give the URL.

    Parameters
    ----------
    runtime : ExpertRuntime
    port : int
        0 for any that is free.

    Raises
    ------
    ConfigError
        If the port is none, or taken.
    MissingDependencyError
        If prometheus_client is not installed.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"a port is a number from 0 to 65535, got {port}")
    collector = PrometheusCollector(runtime, per_layer=True)
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise ConfigError(
            f"port {port} of 127.0.0.1 cannot be served: {error.strerror}; choose another, or 0 "
            "for any that is free"
        ) from error
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def metrics_url(text: str) -> str:
    """Return the URL that is meant: http and /metrics are what is left out.

    Raises
    ------
    ConfigError
        If it is none of http or https, or but a number: a process has no address.
    """
    url = text if "://" in text else f"http://{text}"
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
    # A tenth of a command's start, for what only this one does.
    import http.client
    import urllib.error
    import urllib.request

    from prometheus_client.parser import text_string_to_metric_families

    shown = printable(url)
    try:
        # The scheme is checked by `metrics_url`.
        request = urllib.request.Request(url, headers={"Accept": "text/plain"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            body = answer.read(_MOST_BYTES + 1)
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
