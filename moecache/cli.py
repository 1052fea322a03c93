"""The command line: `moecache COMMAND`."""

import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from moecache import __version__
from moecache.commands import (
    bench,
    chat,
    demo,
    generate,
    inspect,
    pack,
    plan_ranks,
    replay,
    serve,
    simulate,
    top,
    trace,
    warm,
)
from moecache.commands.ctrl_c import CTRL_C, EXIT_CODE
from moecache.commands.parser import CommandParser
from moecache.commands.paths import printable
from moecache.errors import ConfigError, MoeCacheError
from moecache.settings import let_idle_threads_sleep


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code.

    0 is success, 1 failure, 2 wrong usage, 130 interrupted. Errors are one line on standard
    error.
    """
    try:
        return _run(argv)
    except BrokenPipeError:
        # The reader of the output closed it, as `head` does. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to standard error as it is now, which makes room above a line that is shown there."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        self.stream = sys.stderr
        super().emit(record)


def _run(argv: Sequence[str] | None) -> int:
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit:
        # After --help and --version, a reader that has gone shows here, not at exit.
        if sys.stdout is not None:
            sys.stdout.flush()
        raise
    let_idle_threads_sleep()
    logging.basicConfig(
        level=logging.INFO if arguments.verbose else logging.WARNING,
        format="%(levelname)s %(message)s",
        handlers=[_Handler()],
    )
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal's encoding lacks, in a name or a map, are no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with CTRL_C.running():
            code: int = arguments.run(arguments)
    except ConfigError as error:
        return _fail(error, 2)
    except BrokenPipeError:
        raise
    except SystemExit as error:
        # Rich's answer to the same, which also takes care of the exit.
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return 0
    except (MoeCacheError, MemoryError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        CTRL_C.tell()
        return EXIT_CODE
    return code


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="moecache",
        description="Run mixture-of-experts models larger than your memory.",
        epilog="Sizes are written 4GiB or 512MiB. docs/settings.md lists the MOECACHE_* variables.",
    )
    parser.add_argument("--version", action="version", version=f"moecache {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    bench.add_parser(commands)
    chat.add_parser(commands)
    demo.add_parser(commands)
    generate.add_parser(commands)
    inspect.add_parser(commands)
    pack.add_parser(commands)
    plan_ranks.add_parser(commands)
    replay.add_parser(commands)
    serve.add_parser(commands)
    simulate.add_parser(commands)
    top.add_parser(commands)
    trace.add_parser(commands)
    warm.add_parser(commands)
    return parser


def _fail(error: BaseException, code: int) -> int:
    text = str(error) or type(error).__name__
    print(f"moecache: {printable(' '.join(text.split()))}", file=sys.stderr)
    return code
