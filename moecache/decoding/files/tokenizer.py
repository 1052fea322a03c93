"""FileTokenizer: texts as tokens, and conversations as texts, as files say it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from moecache.decoding.files.chat import render


@dataclass(frozen=True)
class FileTokenizer:
    """What files say of their tokens.

    Parameters
    ----------
    backend_tokenizer : tokenizers.Tokenizer
    special : mapping of str to str
        Tokens by what they are for: "bos", "eos", "unk", "pad", "mask".
    chat_template : str, mapping of str to str, or None
        Several by their names.
    """

    backend_tokenizer: Tokenizer
    special: Mapping[str, str]
    chat_template: str | dict[str, str] | None

    def __len__(self) -> int:
        """Return the number of tokens."""
        return int(self.backend_tokenizer.get_vocab_size())

    def __deepcopy__(self, _: object) -> "FileTokenizer":
        """Return this one: nothing of it changes, and any thread may use it."""
        return self

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return a text's tokens as `input_ids`, as transformers' tokenizers do."""
        found = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": found.ids}

    @property
    def bos_token(self) -> str | None:
        """What texts begin with."""
        return self.special.get("bos")

    @property
    def eos_token(self) -> str | None:
        """What texts end with."""
        return self.special.get("eos")

    @property
    def eos_token_id(self) -> int | None:
        """Its number."""
        found: int | None = self.backend_tokenizer.token_to_id(self.eos_token or "")
        return found

    @property
    def all_special_tokens(self) -> list[str]:
        """Tokens that are no text."""
        added = self.backend_tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens, with those that it begins with; it goes on behind them."""
        ids = self(text)["input_ids"]
        return ids[:-1] if ids and ids[-1] == self.eos_token_id else ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return a conversation's tokens with the beginning of an answer.

        Raises
        ------
        ConfigError
            As `chat.render`.
        """
        return self(self.render_chat(messages, variables), add_special_tokens=False)["input_ids"]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of which `encode_chat` makes tokens."""
        return render(self.chat_template, messages, self.special, variables)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False, **_: object) -> str:
        """Return the text of tokens, as transformers' tokenizers do."""
        text: str = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text
