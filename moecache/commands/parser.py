"""CommandParser: an argument parser whose errors and examples are those of its command."""

import argparse
import difflib
from collections.abc import Sequence
from typing import Any


class _Help(argparse.HelpFormatter):
    """Wraps text, and gives each example a line, to be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        word, _, rest = text.partition(": ")
        if word not in ("example", "examples"):
            return super()._fill_text(text, width, indent)
        return "\n".join([f"{indent}{word}:", *(f"{indent}  {one}" for one in rest.split(" | "))])


class CommandParser(argparse.ArgumentParser):
    """A parser of a command, or of one below it.

    An epilog that begins with "examples: " has one example after the other, with " | " between
    them. An argument that is not known is an error of the command that it was given to, which
    shows that command's usage and the option that comes closest.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **keywords})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all arguments; those that are not known end the program."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            given = unknown[0].partition("=")[0]
            known = [one for action in self._actions for one in action.option_strings]
            close = difflib.get_close_matches(given, known, 1) if given.startswith("-") else []
            hint = f"; did you mean {close[0]}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown
