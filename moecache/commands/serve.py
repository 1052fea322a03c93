"""`moecache serve`: a model behind OpenAI's protocol, with a page that shows its experts."""

import argparse
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moecache.commands.arguments import check_outputs
from moecache.commands.generate import add_expert_options, check_max_new_tokens
from moecache.commands.loaded import loaded
from moecache.commands.opened_texts import opened_way, texts_of
from moecache.commands.paths import HUB_NAMES, add_hub_options, find_model, printable
from moecache.commands.prefixes import (
    add_prefix_options,
    check_prefixes,
    describe,
    opened_prefixes,
)
from moecache.commands.ranks import follow, num_ranks, rank, rank_table, telling
from moecache.commands.start_line import StartLine
from moecache.commands.texts import Encoder, Texts
from moecache.errors import ConfigError

if TYPE_CHECKING:
    from moecache.decoding.prefixes import PrefixCache
    from moecache.serving.front import Front
    from moecache.serving.server import Server
    from moecache.telemetry.loading import Loading

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8000
# Rows of the decoding program, whose module is not loaded for the help.
MOST_PARALLEL, DEFAULT_PARALLEL = 16, 4


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="serve a model to chat clients, and show its experts on a page",
        description="Serve a mixture-of-experts model by OpenAI's protocol (/v1/chat/completions, "
        "/v1/completions, /v1/models) to any client of it, with metrics at /metrics and a page "
        "at / that shows what becomes of each expert. Answers keep to a JSON schema or a grammar"
        " that a request names; /tokenize, /props and /slots are llama-server's. Up to "
        "--parallel requests are answered at a time, others wait. Answers are those of `moecache"
        " generate` with the same seed. It listens at once: while "
        "the model is loaded, /health says how far that is, and requests get status 503, or wait"
        " if they say `Prefer: wait=SECONDS`. SIGTERM and Ctrl-C finish the running answers "
        "first. Under torchrun the experts are spread over its processes: rank 0 serves, and the"
        " metrics of rank 1 are at the next port of 127.0.0.1. Needs pip install "
        "'moecache[serve]'.",
        epilog="examples: moecache serve ./Qwen3-30B-A3B --memory 16GiB | "
        "moecache serve -hf unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M | "
        "moecache serve ./OLMoE-1B-7B --port 9000 --host 0.0.0.0 --api-key SECRET",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a checkpoint directory, a .gguf file, or {HUB_NAMES}",
    )
    add_hub_options(parser)
    server = parser.add_argument_group("server")
    server.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to serve; any but this machine's own (127.0.0.1, the default) lets others in",
    )
    server.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        metavar="N",
        help=f"0: any that is free (default: {DEFAULT_PORT})",
    )
    server.add_argument(
        "--api-key",
        metavar="KEY",
        help="what clients must send; @FILE reads it from a file (default: nothing)",
    )
    server.add_argument(
        "--queue",
        type=int,
        default=16,
        metavar="N",
        help="requests that may wait; more get status 503 (default: 16)",
    )
    server.add_argument(
        "--alias",
        "--served-model-name",
        metavar="NAME",
        help="what clients call the model, or several names with commas between them; the first is "
        "what answers say (default: the last part of its path, or its name on the hub)",
    )
    server.add_argument(
        "-c",
        "--ctx-size",
        "--max-model-len",
        dest="context",
        type=int,
        metavar="TOKENS",
        help="most tokens of a prompt and its answer together, for which memory is kept free "
        "(default, or 0: what the model takes; memory for 4096 of them)",
    )
    server.add_argument(
        "-np",
        "--parallel",
        type=int,
        metavar="N",
        help=f"answers generated at a time, 1 to {MOST_PARALLEL}, their tokens by one call; each "
        f"is the one it is alone (default: {DEFAULT_PARALLEL}; 1 where the model has no recipe)",
    )
    server.add_argument(
        "--max-new-tokens",
        "--max-tokens",
        type=int,
        default=4096,
        metavar="N",
        help="tokens of a reply to a chat that says no number (default: 4096)",
    )
    add_expert_options(parser)
    add_prefix_options(parser)
    parser.set_defaults(run=run, force=False)


@telling()
def run(arguments: argparse.Namespace) -> int:
    """Listen, load, serve until a signal comes; return the exit code.

    SIGINT and SIGTERM are ignored after that: the process is about to end.
    """
    key = _check(arguments)
    from moecache.serving import check_serving

    check_serving()
    find_model(arguments)
    if rank() > 0:
        return follow(arguments, loaded, arguments.port)
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
    with (
        _listening(arguments, key, console) as early,
        StartLine(console, early.loading) as line,
        opened_way(arguments, is_chat=True) as (store, why_torch),
        texts_of(arguments, store, why_torch, line, _import_server) as texts,
        opened_prefixes(arguments, texts.runtime, texts.open_prefixes) as prefixes,
    ):
        _serve(arguments, key, console, early, texts, prefixes)
    return 0


def _import_server(encoder: Encoder) -> None:
    """Import what answers while the model comes, and refuse what it lacks before it is there."""
    from moecache.integrations.answer_parts import check_parser
    from moecache.serving import app, engine  # noqa: F401 - others use them

    check_parser(encoder.tokenizer)


def _serve(
    arguments: argparse.Namespace,
    key: str | None,
    console: Console,
    early: "_Early",
    texts: Texts,
    prefixes: "PrefixCache | None",
) -> None:
    """Answer with a model that is there, until a signal comes."""
    from moecache.serving.app import build_app
    from moecache.serving.engine import Engine

    early.loading.enter("preparing to answer")
    served = texts.served()
    alone = served.why_alone
    if alone and (arguments.parallel or 1) > 1:
        console.print(f"moecache: one answer at a time: {alone}")
    engine = Engine(
        served,
        texts.encoder.tokenizer,
        early.names,
        most_waiting=arguments.queue,
        parallel=1 if alone else arguments.parallel or DEFAULT_PARALLEL,
        most_tokens=arguments.max_new_tokens,
        context_tokens=arguments.context,
        prefixes=prefixes,
    )
    with (
        contextlib.closing(engine),
        contextlib.closing(early.server),
        early.server.signals_taken(),
    ):
        app = build_app(engine, key=key, host=arguments.host)
        early.front.open(app, engine, watch=texts.watch())
        url = early.url
        console.print(f"{printable(engine.names[0])} at {url}/v1, page at {url}")
        early.server.wait()
    console.print(_summary(engine))
    if prefixes is not None:
        console.print(describe(prefixes.stats()))
    if num_ranks() > 1:
        console.print(rank_table(texts.rank_figures()))


@dataclass(frozen=True)
class _Early:
    """A server that answers before there is a model."""

    names: tuple[str, ...]
    url: str
    front: "Front"
    loading: "Loading"
    server: "Server"


@contextlib.contextmanager
def _listening(
    arguments: argparse.Namespace, key: str | None, console: Console
) -> Iterator[_Early]:
    """Have a server answer, in a thread that has ended after the block.

    To be entered before torch is imported, which takes seconds: nothing here needs it.
    """
    from moecache.serving.front import Front
    from moecache.serving.guard import is_loopback
    from moecache.serving.server import Server, bind
    from moecache.telemetry.loading import Loading

    host, loading = arguments.host, Loading()
    names = _names(arguments.named, arguments.alias)
    front = Front(names, loading, key=key, host=host, most_waiting=arguments.queue)
    watch = front.look if num_ranks() > 1 else None
    server = Server(front, front, watch=watch, verbose=arguments.verbose)
    with (
        contextlib.closing(bind(host, arguments.port)) as bound,
        contextlib.closing(server),
    ):
        if not is_loopback(host):
            console.print(_warning(host, key))
        url = f"http://{host if ':' not in host else f'[{host}]'}:{bound.getsockname()[1]}"
        server.start(bound)
        logger.info("server.listening url=%s", url)
        yield _Early(names, url, front, loading, server)


def _check(arguments: argparse.Namespace) -> str | None:
    """Refuse what cannot be used, before anything is loaded; return the key."""
    if arguments.queue < 0:
        raise ConfigError(f"--queue must not be negative, got {arguments.queue}")
    if arguments.parallel is not None and not 1 <= arguments.parallel <= MOST_PARALLEL:
        raise ConfigError(f"--parallel must be from 1 to {MOST_PARALLEL}, got {arguments.parallel}")
    if arguments.context == 0:
        # llama-server's word for the model's own.
        arguments.context = None
    if arguments.context is not None and not 2 <= arguments.context < 2**31:
        raise ConfigError(f"--ctx-size must be from 2 to {2**31 - 1}, got {arguments.context}")
    _aliases(arguments.alias)
    check_max_new_tokens(arguments)
    check_prefixes(arguments)
    check_outputs(arguments, {}, profile=None)
    key: str | None = arguments.api_key
    if key is not None and key.startswith("@"):
        key = Path(key[1:]).read_text(encoding="utf-8", errors="surrogateescape").strip()
    if key is None:
        return None
    if not key:
        raise ConfigError("--api-key is empty; is a shell variable unset?")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("--api-key must be of ASCII letters, digits and signs, without spaces")
    return key


def _names(model: str, alias: str | None = None) -> tuple[str, ...]:
    """Return what a client may call the model: aliases, a path's last part, the whole name."""
    last = Path(model).resolve().name if Path(model).exists() else model
    return tuple(dict.fromkeys((*_aliases(alias), last, model)))


def _aliases(alias: str | None) -> tuple[str, ...]:
    if alias is None:
        return ()
    names = tuple(name.strip() for name in alias.split(","))
    if not all(name and name.isprintable() for name in names):
        raise ConfigError(f"--alias must be names with commas between them, got {alias!r}")
    return names


def _warning(host: str, key: str | None) -> str:
    who = f"moecache: {host} is no address of this machine alone: whoever reaches it "
    if key is None:
        return who + "can use the model, as there is no --api-key"
    return who + "needs the key, which http sends as it is; put https before it"


def _summary(engine: Any) -> str:
    totals = engine.totals
    return (
        f"{totals.answered} answers of {totals.completion_tokens} tokens; {totals.refused} "
        f"requests refused, {totals.left} left by their clients, {totals.failed} failed"
    )
