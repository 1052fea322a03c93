"""Room: how many tokens fit into a model's context behind a prompt."""

from moecache.errors import ConfigError


def context_of(own: int | None, most: int | None = None) -> int | None:
    """Return the tokens that a text may have, `None` if there is no end.

    Parameters
    ----------
    own : int or None
        Those that the model takes.
    most : int, optional
        A bound beside it.
    """
    return own if most is None else most if own is None else min(own, most)


def room_behind(
    prompt_tokens: int, own: int | None, most: int | None = None, *, at_least: bool = False
) -> int | None:
    """Return how many tokens fit into the context after a prompt; `None` if it has no end.

    Parameters
    ----------
    prompt_tokens : int
    own, most : int, optional
        As those of `context_of`.
    at_least : bool, default False
        Whether the prompt may have more tokens than that, as the message then says.

    Raises
    ------
    ConfigError
        If there is no room for one.
    """
    context = context_of(own, most)
    if context is None:
        return None
    if context <= prompt_tokens:
        whose = "the model" if own == context else "the server"
        raise ConfigError(
            f"the prompt of {'at least ' if at_least else ''}{prompt_tokens} tokens leaves no room "
            f"for new ones; {whose} takes {context}"
        )
    return context - prompt_tokens
