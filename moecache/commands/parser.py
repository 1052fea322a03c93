"""CommandParser: an argument parser whose errors and examples are those of its command."""

import argparse
import difflib
from collections.abc import Sequence
from typing import Any

# llama-server's names of an option that says which model it is.
_MODEL_OPTIONS = ("-hf", "-hfr", "--hf-repo")


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
        if "-hf" in self._option_string_actions and args is not None:
            args = _model_first(args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            given = unknown[0].partition("=")[0]
            known = [one for action in self._actions for one in action.option_strings]
            close = difflib.get_close_matches(given, known, 1) if given.startswith("-") else []
            hint = f"; did you mean {close[0]}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown


def _model_first(args: Sequence[str]) -> list[str]:
    """Return arguments with the value of -hf as the first positional one, which is the MODEL."""
    given = list(args)
    end = given.index("--") if "--" in given else len(given)
    for place, one in enumerate(given[:end]):
        option, sign, value = one.partition("=")
        if one in _MODEL_OPTIONS and place + 1 < end:
            return [given[place + 1], *given[:place], *given[place + 2 :]]
        if option in _MODEL_OPTIONS and sign:
            return [value, *given[:place], *given[place + 1 :]]
    return given
