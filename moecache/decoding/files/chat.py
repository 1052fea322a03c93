"""Chat templates: a conversation as the text that a model was trained on, by jinja2."""

import datetime as dt
import functools
import json
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from moecache.errors import ConfigError

# Sandboxes of earlier releases can be left.
_LEAST = (3, 1, 6)
# Not a request's to say: what `render` gives, and what transformers' own takes as arguments.
_OWN = frozenset(
    (
        *("messages", "conversation", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)


def no_template() -> ConfigError:
    """Return the error that a tokenizer has no chat template."""
    return ConfigError(
        "the model's tokenizer has no chat template: it is no chat model, or its "
        "chat_template.jinja is missing; continue the text as it is, without a chat"
    )


def template_failed(error: Exception) -> ConfigError:
    """Return the error that a template, which is a program of the model's, has raised one."""
    return ConfigError(
        f"the model's chat template failed: {' '.join(str(error).split())}; continue the "
        "text as it is, without a chat"
    )


def render(
    template: str | Mapping[str, str] | None,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, str],
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return a conversation as text, with the beginning of an answer; as transformers does.

    Templates are programs that come with a model: they run in jinja2's sandbox.

    Parameters
    ----------
    template : str, mapping of str to str, or None
        Of several the one that is called "default", or "tool_use" if there are tools.
    messages : sequence of mapping
        Each with a "role" and its "content".
    special : mapping of str to str
        Tokens by their names without "_token".
    variables : mapping, optional
        What the template may look at beside: "tools", "enable_thinking" and the like.

    Raises
    ------
    ConfigError
        If there is no template, or it refuses these messages.
    """
    given = dict(variables or {})
    for name in given:
        if name in _OWN:
            raise ConfigError(
                f"{name!r} is not for a chat template to look at; leave it out of its variables"
            )
    several = {} if template is None or isinstance(template, str) else template
    has_tools = given.get("tools") is not None
    wanted = "tool_use" if has_tools and "tool_use" in several else "default"
    source = template if isinstance(template, str) else several.get(wanted)
    if source is None:
        raise no_template()
    check_sandbox()
    try:
        found: str = _compiled(source).render(
            {
                "tools": None,
                **{f"{name}_token": token for name, token in special.items()},
                **given,
                "messages": list(messages),
                "documents": None,
                "add_generation_prompt": True,
            }
        )
    except MemoryError:
        raise
    except Exception as error:  # it raises what it likes
        raise template_failed(error) from error
    return found


@functools.cache
def has_sandbox() -> bool:
    """Return whether jinja2 is installed, of a release whose sandbox holds what is not trusted."""
    try:
        numbers = re.findall(r"\d+", version("jinja2"))
    except PackageNotFoundError:
        return False
    return tuple(map(int, numbers[:3])) >= _LEAST


def check_sandbox() -> None:
    """Raise a ConfigError unless `has_sandbox`."""
    if not has_sandbox():
        raise ConfigError(
            "chat templates are programs of strangers, for which jinja2 3.1.6 or later is needed; "
            "install it with: pip install -U jinja2"
        )


@functools.lru_cache(8)
def _compiled(source: str) -> Any:
    """Return a template's program, which takes some 20 ms to make."""
    return _environment().from_string(source)


@functools.cache
def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Answers(Extension):
        """The tag around what is the model's, which is text like any other here."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(
                ("name:endgeneration",), drop_needle=True
            )
            return body

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    def now(form: str) -> str:
        return dt.datetime.now().astimezone().strftime(form)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Answers, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals.update(raise_exception=refuse, strftime_now=now)
    return made
