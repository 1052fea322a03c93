"""`moecache trace record`: the routing of the demo's model, as it generates text."""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from moecache.commands.arguments import add_force, check_output
from moecache.commands.example import (
    add_runtime_options,
    add_sampling_options,
    check_sampling,
    find_example,
    generate,
    write_text,
)
from moecache.commands.paths import printable
from moecache.errors import ConfigError, StoreError
from moecache.runtime.open import open  # noqa: A004 - moecache.open
from moecache.stores import open_store
from moecache.traces.trace import TRACE_FILE

DEFAULT_PROMPTS = (
    'class Cache:\n    """',
    "def main(argv=None):\n    ",
    "# This module implements ",
    "import os\nimport sys\n\n",
)


def add_parser(actions: Any) -> None:
    """Add the action to the parser."""
    parser: argparse.ArgumentParser = actions.add_parser(
        "record",
        help="record the routing of the demo's model",
        description="Generate text with the tiny model that comes with moecache and record what "
        "its router chooses, prompts included. Several prompts are several sequences. The trace "
        "does not depend on memory, policy or scope; its metadata says what they were.",
        epilog='example: moecache trace record tiny.npz --prompt "def main():" --prompt "class A:"',
    )
    parser.add_argument("output", metavar="OUT.npz", help="the file to write")
    add_force(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue, once per sequence (default: four that are built in)",
    )
    parser.add_argument(
        "--prompt-file", action="append", metavar="FILE", help="as --prompt, out of a file"
    )
    add_sampling_options(parser, max_new_tokens=120)
    add_runtime_options(parser)
    parser.add_argument("--quiet", action="store_true", help="do not show the text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate, record, say what was written; return the exit code."""
    prompts = list(arguments.prompt or ())
    files = arguments.prompt_file or ()
    inputs = dict.fromkeys(files, "--prompt-file")
    kind = None if arguments.force else TRACE_FILE
    check_output("OUT.npz", arguments.output, inputs, kind)
    for name in files:
        try:
            prompts.append(Path(name).read_text(errors="surrogateescape"))
        except OSError as error:
            raise ConfigError(f"--prompt-file {name}: {error.strerror or error}") from error
        if not prompts[-1]:
            raise ConfigError(f"--prompt-file {name} is empty")
    prompts = prompts or list(DEFAULT_PROMPTS)
    check_sampling(arguments, prompts)
    loop, directory = find_example(arguments.model)
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
    with (
        open_store(directory) as store,
        open(
            directory,
            arguments.memory,
            policy=arguments.policy,
            scope=arguments.scope,
            prefetch=arguments.prefetch,
            dtype=np.float32,
        ) as runtime,
    ):
        model = loop.NumpyMoe(store, loop.through_moecache(runtime))
        for prompt in prompts:
            if len(os.fsencode(prompt)) >= model.max_tokens:
                raise ConfigError(
                    f"a prompt of {len(os.fsencode(prompt))} bytes leaves no room for new tokens; "
                    f"the model takes {model.max_tokens}; shorten --prompt or --prompt-file"
                )
        with runtime.record_trace(arguments.output, force=arguments.force) as recording:
            for prompt in prompts:
                runtime.begin_sequence()
                model.num_tokens = 0
                show = _ignore if arguments.quiet else write_text
                show(prompt)
                generate(loop, model, prompt, arguments, show)
                show("\n\n")
        if recording.trace is None or not recording.saved:
            raise StoreError(f"{arguments.output}: was not written")
        console.print(printable(f"{arguments.output}: {recording.trace!r}"))
        console.print(f"hit rate {runtime.stats().hit_rate:.1%} with policy {runtime.cache.policy}")
    return 0


def _ignore(text: str) -> None:
    """Show nothing."""
