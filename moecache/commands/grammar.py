"""The options of a command that say which texts its model may write."""

import argparse
from pathlib import Path
from typing import Any

from moecache.commands.ranks import num_ranks
from moecache.errors import ConfigError

# A name of a file is no longer.
_MOST_NAME = 1024


def add_grammar_options(parser: argparse.ArgumentParser) -> None:
    """Add the options; `check_grammar` looks at them."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema",
        metavar="SCHEMA",
        help="write JSON by a schema: a file, or the schema itself; needs pip install "
        "'moecache[serve]', and likewise:",
    )
    group.add_argument(
        "--grammar",
        metavar="FILE",
        help="write a text of a grammar, in GBNF (a rule `root ::=`) or Lark (a rule `start:`)",
    )


def check_grammar(arguments: argparse.Namespace) -> tuple[str, str]:
    """Return the option that is given and its text, before anything is loaded; or none.

    Raises
    ------
    ConfigError
        If there are several processes, of which one alone would know the grammar, or the file
        cannot be read.
    """
    option = "--json-schema" if arguments.json_schema is not None else "--grammar"
    given: str | None = (
        arguments.grammar if arguments.json_schema is None else arguments.json_schema
    )
    if given is None:
        return "", ""
    if num_ranks() > 1:
        raise ConfigError(f"{option} is for one process; leave it out, or run without torchrun")
    if option == "--json-schema" and given.lstrip()[:1] == "{":
        return option, given
    if not given or len(given) > _MOST_NAME:
        raise ConfigError(f"{option} {given[:40]!r} is no name of a file")
    try:
        return option, Path(given).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}: {given} is no UTF-8 text; convert it with iconv") from error
    except OSError as error:
        raise ConfigError(f"{option}: {given} cannot be read: {error.strerror}") from error


def read_grammar(option: str, text: str) -> Any:
    """Return the grammar of an option's text, or `None` if no option is given.

    Raises
    ------
    ConfigError
        If it is none.
    """
    if not option:
        return None
    import json

    from moecache.serving.grammars import Grammar

    if option == "--grammar":
        return Grammar.of_text(text, option)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} is no JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise ConfigError(f"{option} must be an object of JSON, such as {{}}")
    return Grammar.of_schema(schema, option)
