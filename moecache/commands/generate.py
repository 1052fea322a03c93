"""`moecache generate`: text by any mixture-of-experts model, in the memory there is."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moecache.commands.arguments import (
    PLAIN_MODES,
    add_force,
    add_option,
    check_outputs,
    explain,
)
from moecache.commands.grammar import (
    add_grammar_options,
    check_grammar,
    read_grammar,
)
from moecache.commands.live_line import LiveLine
from moecache.commands.loaded import loaded
from moecache.commands.opened_texts import opened_texts
from moecache.commands.paths import HUB_NAMES, add_hub_options, find_model, printable_lines
from moecache.commands.prefixes import add_prefix_options, check_prefixes, opened_prefixes
from moecache.commands.ranks import (
    add_rank_options,
    follow,
    num_ranks,
    rank,
    rank_table,
    telling,
)
from moecache.commands.texts import Encoder, Texts
from moecache.decoding import streams
from moecache.errors import ConfigError, StoreError
from moecache.runtime.runtime import ExpertRuntime
from moecache.settings import COMPUTE
from moecache.telemetry import RuntimeStats
from moecache.traces.trace import TRACE_FILE
from moecache.units import check_seed, format_bytes

if TYPE_CHECKING:
    from moecache.decoding.prefixes import PrefixCache


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="generate text with a mixture-of-experts model larger than your memory",
        description="Continue a prompt with any mixture-of-experts model that transformers runs, "
        "with its experts in as much memory as --memory says. The text comes on standard output "
        "as it is generated, figures on standard error. It is the same text, token by token, as "
        "that of the model completely in memory, unless --compute asks for kernels, which round "
        "otherwise. A GGUF file or quantized checkpoint of most families (Qwen, gpt-oss, GLM, "
        "DeepSeek, LFM2 and others: docs/gguf.md) is computed without torch, in float32, and "
        "needs pip install 'moecache[text]'; all others 'moecache[transformers]'. Under "
        "torchrun (torchrun --nproc-per-node 2 -m moecache generate ...) the experts are spread "
        "over its processes.",
        epilog="examples: moecache generate ./Qwen3-30B-A3B 'Why is the sky blue?' --chat "
        "--memory 16GiB | moecache generate ./OLMoE-1B-7B 'def main():' --temperature 0 | "
        "moecache generate ./Mixtral-8x7B --chat - < question.txt > answer.txt",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a checkpoint directory, a .gguf file (of a split one any part), or {HUB_NAMES}",
    )
    add_hub_options(parser)
    parser.add_argument(
        "prompt", metavar="PROMPT", help='the text to continue; "-" reads standard input'
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a question: put it into the model's chat template",
    )
    add_sampling_options(parser, max_new_tokens=256)
    add_grammar_options(parser)
    cache = add_expert_options(parser)
    add_option(cache, "record_trace")
    add_prefix_options(parser)
    parser.add_argument(
        "--stats", action="store_true", help="show all counters at the end, layer by layer"
    )
    add_force(parser)
    parser.set_defaults(run=run)


def add_sampling_options(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    """Add the options that say how text is drawn; `check_sampling` looks at them."""
    parser.add_argument(
        "--max-new-tokens",
        "--max-tokens",
        type=int,
        default=max_new_tokens,
        metavar="N",
        help=f"tokens to generate (default: {max_new_tokens})",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        help="0 takes the likeliest token (default: what the model's generation_config.json says)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of what is drawn, from -2**63 to 2**63 - 1 (default: 0)",
    )


def add_expert_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options that `loaded` reads; return their group."""
    cache = parser.add_argument_group("experts")
    add_option(cache, "memory", "; the trunk comes on top")
    cache.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help='where trunk and experts are computed: "cpu" (default), or a GPU, "cuda" or "cuda:1", '
        "and then --memory is of its memory",
    )
    add_option(cache, "policy")
    add_option(cache, "scope")
    add_model_options(cache)
    cache.add_argument(
        "--compute",
        choices=COMPUTE,
        help=f"what multiplies: {explain(COMPUTE)} (default: torch, or fast for what was packed in "
        "a format)",
    )
    add_option(cache, "profile")
    add_rank_options(cache)
    return cache


def add_model_options(parser: argparse._ActionsContainer) -> None:
    """Add the options of `load` that `moecache bench` has, too."""
    modes = {
        "router": "the next layer's router, given this layer's input",
        "auto": "as router, while tokens are faster with it",
        **PLAIN_MODES,
    }
    add_option(parser, "prefetch", modes=modes)
    add_option(parser, "read")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="compute in this type (default: the checkpoint's)",
    )


@telling()
def run(arguments: argparse.Namespace) -> int:
    """Load, generate, show the figures; return the exit code."""
    check_sampling(arguments)
    check_outputs(arguments, {}, profile=None, record_trace=TRACE_FILE)
    check_prefixes(arguments)
    if arguments.prefix_cache is None:
        # A single prompt finds no page in memory: none is kept, and no memory for any.
        arguments.prefix_memory = None
    given = check_grammar(arguments)
    # Before torch, whose import takes seconds.
    find_model(arguments)
    if rank() > 0:
        return follow(arguments, loaded)
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
    grammar = read_grammar(*given)
    prompt, found = _prompt(arguments), list[Any]()

    def encode(encoder: Encoder) -> None:
        if arguments.chat:
            found.append(encoder.encode_chat([{"role": "user", "content": prompt}]))
        else:
            found.append(encoder.encode(prompt))

    with (
        opened_texts(arguments, console, encode, is_chat=arguments.chat) as texts,
        _recorded(texts.runtime, arguments),
        _kept_prefixes(arguments, texts) as prefixes,
    ):
        runtime, ids = texts.runtime, found[0]
        with LiveLine(console, runtime) as text:
            stream = streams.TextStream(texts.encoder.tokenizer, ids, text.write)
            text.stamps_s, text.prompt = stream.stamps_s, stream.progress
            try:
                texts.continue_tokens(
                    ids,
                    stream,
                    max_new_tokens=arguments.max_new_tokens,
                    temperature=arguments.temperature,
                    seed=arguments.seed,
                    mask=grammar and texts.new_mask(grammar),
                    prefixes=prefixes,
                )
            except KeyboardInterrupt:
                stream.end()
                raise
        console.print(_summary(ids.shape[1], stream, runtime.stats()), style="dim")
        if num_ranks() > 1:
            console.print(rank_table(texts.rank_figures()), style="dim")
        if arguments.stats:
            console.print(printable_lines(texts.report()))
    return 0


def _kept_prefixes(
    arguments: argparse.Namespace, texts: Texts
) -> "contextlib.AbstractContextManager[PrefixCache | None]":
    """Open the pages of prompts that are in files, if they are asked for."""
    if arguments.prefix_cache is None:
        return contextlib.nullcontext()
    return opened_prefixes(arguments, texts.runtime, texts.open_prefixes)


@contextlib.contextmanager
def _recorded(runtime: ExpertRuntime, arguments: argparse.Namespace) -> Iterator[None]:
    """Record the routing meanwhile if asked to; fail if the trace cannot be written."""
    path = arguments.record_trace
    if path is None:
        yield
        return
    with runtime.record_trace(path, force=arguments.force) as recording:
        yield
    if not recording.saved:
        raise StoreError(f"{path}: the trace was not written; is there room?")


def check_sampling(arguments: argparse.Namespace) -> None:
    """Refuse options of `add_sampling_options` that cannot be used."""
    check_max_new_tokens(arguments)
    temperature = arguments.temperature
    if temperature not in (None, 0) and not 0.01 <= temperature <= 100:
        raise ConfigError(f"--temperature must be 0 or between 0.01 and 100, got {temperature}")
    check_seed(arguments.seed, "--seed")


def check_max_new_tokens(arguments: argparse.Namespace) -> None:
    """Refuse a number that torch cannot count to."""
    if not 1 <= arguments.max_new_tokens < 2**31:
        raise ConfigError(
            f"--max-new-tokens must be from 1 to {2**31 - 1}, got {arguments.max_new_tokens}"
        )


def _prompt(arguments: argparse.Namespace) -> str:
    prompt: str = arguments.prompt
    if prompt == "-":
        if sys.stdin is None:
            raise ConfigError('the prompt is "-", but there is no standard input')
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input is no text: {error}") from error
    if not prompt:
        raise ConfigError("the prompt is empty; the model needs something to start from")
    check_text("the prompt", prompt)
    return prompt


def check_text(what: str, text: str) -> None:
    """Refuse bytes that are no text, which Python has as half characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is no UTF-8 text; convert it with iconv") from error


def _summary(prompt_tokens: int, times: Any, stats: RuntimeStats) -> str:
    tokens = len(times.stamps_s)
    # A single token has no rate.
    decode = f", {times.tokens_per_s:.1f} tokens/s" if tokens > 1 else ""
    known = f" ({times.cached_tokens} known)" if times.cached_tokens else ""
    return (
        f"{tokens} tokens{decode}; prompt of {prompt_tokens}{known} in {times.prefill_s:.2f} s; "
        f"hit rate {stats.hit_rate:.1%} with {stats.capacity} of {stats.total_experts} experts in "
        f"{format_bytes(stats.pool_bytes)}; {format_bytes(stats.bytes_read)} read, "
        f"{stats.stall_ns / 1e9:.2f} s waited for"
    )
