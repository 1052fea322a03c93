"""The file of a conversation: `moecache chat --resume`."""

import json
from pathlib import Path

from moecache.errors import FormatError, StoreError
from moecache.files import Kind, write_whole

_MARK = b'{"moecache": "conversation"'
_ROLES = ("system", "user", "assistant")
_MOST_BYTES = 64 * 2**20

CONVERSATION = Kind("a conversation", lambda known: known.startswith(_MARK))


def read_conversation(path: str) -> list[dict[str, str]]:
    """Return the messages of a conversation; none if there is no file, or an empty one.

    Raises
    ------
    StoreError
        If it cannot be read; FormatError if it is no conversation.
    """
    try:
        if Path(path).is_fifo():
            raise StoreError(f"{path}: is no regular file; name another")
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not data:
        return []
    try:
        found = json.loads(data) if len(data) <= _MOST_BYTES else None
    except (ValueError, RecursionError):
        found = None
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise FormatError(f"{path}: is no conversation of moecache chat; name another file")
    for place, one in enumerate(messages):
        try:
            one["content"].encode()
        except UnicodeEncodeError as error:
            raise FormatError(
                f"{path}: message {place} has a lone surrogate at {error.start}, which is no text; "
                "mend it, or name another file"
            ) from error
    return [{"role": one["role"], "content": one["content"]} for one in messages]


def write_conversation(path: str, messages: list[dict[str, str]]) -> None:
    """Write a conversation, whole or not at all.

    Raises
    ------
    ConfigError
        If it would replace something else.
    StoreError
        If it cannot be written.
    """
    data = json.dumps({"moecache": "conversation", "messages": messages}, indent=1)
    # On one line up to its messages, so that the file can be told from others.
    write_whole(path, data.replace("{\n ", "{", 1).encode(), CONVERSATION)


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in _ROLES
        and isinstance(message.get("content"), str)
    )
