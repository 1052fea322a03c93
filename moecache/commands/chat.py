"""`moecache chat`: a conversation with a model on the terminal."""

import argparse
import contextlib
import io
import sys
from typing import Any

from rich.console import Console

from moecache.commands.arguments import check_outputs
from moecache.commands.conversation import (
    CONVERSATION,
    read_conversation,
    write_conversation,
)
from moecache.commands.ctrl_c import CTRL_C
from moecache.commands.example import write_text
from moecache.commands.generate import (
    add_expert_options,
    add_sampling_options,
    check_sampling,
    check_text,
)
from moecache.commands.live_line import LiveLine
from moecache.commands.opened_texts import opened_texts
from moecache.commands.paths import (
    HUB_NAMES,
    add_hub_options,
    find_model,
    printable,
    printable_lines,
)
from moecache.commands.prefixes import (
    add_prefix_options,
    check_prefixes,
    describe,
    opened_prefixes,
)
from moecache.commands.ranks import num_ranks
from moecache.commands.texts import Encoder, Texts
from moecache.decoding import streams
from moecache.errors import ConfigError, MoeCacheError, StoreError
from moecache.telemetry import RuntimeStats
from moecache.units import format_bytes

# Longer texts take minutes to tokenize, and exceed the context of every model.
_MOST_CHARACTERS = 2**23
_HELP = """\
/reset   forget the conversation
/stats   show all counters, layer by layer
/help    show this
Ctrl-C   stop the reply; its text so far stays in the conversation
Ctrl-D   leave"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "chat",
        help="talk with a mixture-of-experts model larger than your memory",
        description="Talk with a mixture-of-experts model on the terminal, with its experts in as "
        "much memory as --memory says. Each reply is that of `moecache generate` with the same "
        "seed after the same conversation. In the conversation, /reset forgets it, /stats shows "
        "counters, /help the rest; Ctrl-C stops a reply, Ctrl-D leaves. Needs "
        "pip install 'moecache[transformers]', or 'moecache[text]' for what is computed without "
        "torch: a GGUF file or quantized checkpoint of most families (docs/gguf.md).",
        epilog="examples: moecache chat ./Qwen3-30B-A3B --memory 16GiB | "
        "moecache chat ./OLMoE-1B-7B --system 'Answer in one sentence.' --temperature 0",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a checkpoint directory, a .gguf file, or {HUB_NAMES}",
    )
    add_hub_options(parser)
    parser.add_argument(
        "--system",
        metavar="TEXT",
        help="what the model is told before all else; a conversation that goes on keeps its own",
    )
    add_sampling_options(parser, max_new_tokens=1024)
    parser.add_argument(
        "--resume",
        metavar="FILE",
        help="go on with the conversation of this file, if it is there, and write it back after "
        "each reply",
    )
    add_expert_options(parser)
    add_prefix_options(parser)
    parser.set_defaults(run=run, force=False)


def run(arguments: argparse.Namespace) -> int:
    """Load, talk until the input ends; return the exit code."""
    check_sampling(arguments)
    check_outputs(arguments, {}, profile=None, resume=CONVERSATION)
    check_prefixes(arguments)
    check_text("--system", arguments.system or "")
    if sys.stdin is None:
        raise ConfigError("there is no standard input to talk with")
    if num_ranks() > 1:
        raise ConfigError("chat is for one process; with several use moecache serve and a client")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    find_model(arguments)
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
    told = _told(arguments)

    def check(encoder: Encoder) -> None:
        # A template may be damaged.
        hello = [*told, {"role": "user", "content": "Hello"}]
        encoder.check_chat(hello)
        if arguments.resume is not None:
            resumed.extend(_resumed(arguments))
            encoder.check_chat(resumed or hello)

    resumed: list[dict[str, str]] = []
    with (
        opened_texts(arguments, console, check, is_chat=True) as texts,
        opened_prefixes(arguments, texts.runtime, texts.open_prefixes) as prefixes,
    ):
        console.print("/help shows what else can be typed; Ctrl-D leaves", style="dim")
        return _Conversation(console, texts, arguments, resumed or told, prefixes).run()


class _Conversation:
    """The conversation so far, and its continuation."""

    def __init__(
        self,
        console: Console,
        texts: Texts,
        arguments: argparse.Namespace,
        messages: list[dict[str, str]],
        prefixes: Any,
    ) -> None:
        self._console = console
        self._texts = texts
        self._arguments = arguments
        self._messages = messages
        self._prefixes = prefixes
        self._is_kept = True

    def run(self) -> int:
        """Read lines and reply until the input ends; return the exit code.

        An interrupt ends what is under way.
        """
        told = ""
        while True:
            kept, is_asked, note, told = len(self._messages), False, told, ""
            try:
                # First here: until then a repeat of an interrupt would leave the loop.
                CTRL_C.answer()
                if note:
                    self._say(note)
                line = self._read()
                if line is None:
                    return 0 if self._is_kept else 1
                # Bytes that are no text come as half characters, which no tokenizer takes.
                text = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace").strip()
                is_asked = True
                if text.startswith("/"):
                    self._obey(text)
                elif len(text) > _MOST_CHARACTERS:
                    self._say(f"a line of {len(text)} characters is too long to be a question")
                elif text:
                    self._reply(text)
            except KeyboardInterrupt:
                del self._messages[kept:]
                told = "stopped; the question is forgotten" if is_asked else "\nCtrl-D leaves"

    def _read(self) -> str | None:
        """Return a line, or `None` at the end."""
        if not (sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()):
            return sys.stdin.readline() or None
        with contextlib.suppress(ImportError):
            # Lines that can be edited, and earlier ones; `input` uses it once it is there.
            import readline  # noqa: F401
        try:
            return input("> ")
        except EOFError:
            write_text("\n")
            return None

    def _obey(self, text: str) -> None:
        if text == "/reset":
            self._reset()
            self._say("the conversation begins anew")
        elif text == "/stats":
            self._say(printable_lines(self._texts.report()))
            if self._prefixes is not None:
                self._say(describe(self._prefixes.stats()))
        elif text == "/help":
            self._say(_HELP)
        else:
            self._say(f"{printable(text[:40])} is none of /reset, /stats, /help")

    def _reply(self, text: str) -> None:
        """Generate what follows; a reply that was stopped is one, a failed one never was."""
        arguments, texts, runtime = self._arguments, self._texts, self._texts.runtime
        parts: list[str] = []
        self._messages.append({"role": "user", "content": text})
        before: RuntimeStats = runtime.stats()
        try:
            ids = texts.encoder.encode_chat(self._messages)
            with LiveLine(self._console, runtime) as line:

                def write(part: str) -> None:
                    parts.append(part)
                    line.write(part)

                stream = streams.TextStream(texts.encoder.tokenizer, ids, write)
                line.stamps_s, line.prompt = stream.stamps_s, stream.progress
                try:
                    texts.continue_tokens(
                        ids,
                        stream,
                        max_new_tokens=arguments.max_new_tokens,
                        temperature=arguments.temperature,
                        seed=arguments.seed,
                        prefixes=self._prefixes,
                    )
                except KeyboardInterrupt:
                    stream.end()
        except MoeCacheError as error:
            self._messages.pop()
            remedy = "; /reset begins anew" if "leaves no room" in str(error) else ""
            self._say(f"moecache: {printable(' '.join(str(error).split()))}{remedy}", "red")
            return
        self._messages.append({"role": "assistant", "content": "".join(parts)})
        self._keep()
        self._say(_figures(stream, runtime.stats() - before))

    def _reset(self) -> None:
        self._messages = _told(self._arguments)
        self._keep()

    def _keep(self) -> None:
        """Write the conversation to its file, if it has one."""
        if self._arguments.resume is None:
            return
        self._is_kept = False
        try:
            write_conversation(self._arguments.resume, self._messages)
            self._is_kept = True
        except StoreError as error:
            self._say(f"moecache: {printable(error)}; the conversation goes on", "red")

    def _say(self, text: str, style: str = "dim") -> None:
        self._console.print(text, style=style)


def _told(arguments: argparse.Namespace) -> list[dict[str, str]]:
    """Return the messages with which each conversation begins."""
    return [] if arguments.system is None else [{"role": "system", "content": arguments.system}]


def _resumed(arguments: argparse.Namespace) -> list[dict[str, str]]:
    """Return the messages of the file, or none where nothing was said yet.

    Raises
    ------
    ConfigError
        If the option names another system message than the conversation has.
    """
    messages = read_conversation(arguments.resume)
    if arguments.system is None:
        return messages
    known = [one["content"] for one in messages if one["role"] == "system"]
    if len(known) == len(messages):
        return []
    if known != [arguments.system]:
        found = f"the system message {known[0][:80]!r}" if known else "no system message"
        raise ConfigError(
            f"--system: the conversation in {arguments.resume} goes on with {found}; leave "
            "--system out, or begin another conversation with another file"
        )
    return messages


def _figures(stream: Any, stats: RuntimeStats) -> str:
    tokens = len(stream.stamps_s)
    rate = f", {stream.tokens_per_s:.1f}/s" if tokens > 1 else ""
    known = f" ({stream.cached_tokens} tokens known)" if stream.cached_tokens else ""
    return (
        f"{tokens} tokens{rate}; prompt {stream.prefill_s:.2f} s{known}; "
        f"hit rate {stats.hit_rate:.1%}; {format_bytes(stats.bytes_read)} read, "
        f"{stats.stall_ns / 1e9:.2f} s waited for"
    )
