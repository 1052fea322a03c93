"""The tokenizer of a GGUF file, with its chat template, of the file's metadata."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from moecache.decoding.files.splits import SPLITS, Split
from moecache.decoding.files.tokenizer import FileTokenizer
from moecache.errors import ConfigError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # of tokenizer.ggml.token_type
_TEMPLATE = "tokenizer.chat_template"
# Names in transformers -> in files.
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "mask": "mask"}
_SPACE = "\u2581"


def read_tokenizer(metadata: Mapping[str, Any]) -> FileTokenizer:
    """Return the tokenizer of a GGUF file, whose ids are those of llama.cpp.

    Parameters
    ----------
    metadata : mapping
        The file's values by key, with all that begin with "tokenizer.".

    Raises
    ------
    ConfigError
        If its model, or the way in which it cuts texts, is not known, or the vocabulary
        contradicts itself.
    """
    said = _Vocabulary(metadata)
    build = _MODELS.get(said.model) if isinstance(said.model, str) else None
    if build is None:
        raise ConfigError(
            f"tokenizer model {said.model!r} is not supported; supported are "
            f"{', '.join(sorted(_MODELS))}: give the tokenizer of the original model, by "
            "transformers.AutoTokenizer"
        )
    try:
        found, adds_bos = build(said)
        found.add_special_tokens(said.added((_CONTROL, _UNKNOWN)))
        found.add_tokens(said.added((_USER_DEFINED,)))
        _frame(found, said, adds_bos=adds_bos)
    except ConfigError:
        raise
    except Exception as error:  # tokenizers has no class for its errors
        raise ConfigError(f"the GGUF file's vocabulary cannot be used: {error}") from error
    special = {name: said.special(key) for name, key in _SPECIAL.items()}
    known = {name: token for name, token in special.items() if token is not None}
    return FileTokenizer(found, known, _chat_template(metadata))


class _Vocabulary:
    """A file's metadata about its tokens."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.model = metadata.get("tokenizer.ggml.model")
        self.tokens = self._list("tokens", str)
        if not self.tokens:
            raise ConfigError(
                "the GGUF file has no vocabulary (tokenizer.ggml.tokens); give the tokenizer of "
                "the original model, by transformers.AutoTokenizer"
            )
        self.types = self._list("token_type", int) or [1] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise ConfigError(
                f"the GGUF file has {len(self.tokens)} tokens, but types of {len(self.types)}; "
                "download it again"
            )
        self.ids = {token: index for index, token in enumerate(self.tokens)}

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def special(self, key: str) -> str | None:
        index = self.get(f"{key}_token_id")
        known = isinstance(index, int) and 0 <= index < len(self.tokens)
        return self.tokens[index] if known else None

    def added(self, kinds: tuple[int, ...]) -> list[AddedToken]:
        return [
            AddedToken(token, normalized=False, special=kinds != (_USER_DEFINED,))
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in kinds and token
        ]

    def merges(self) -> list[tuple[str, str]]:
        # A token may begin with a space.
        cuts = [(merge, merge.find(" ", 1)) for merge in self._list("merges", str)]
        return [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts]

    def scores(self) -> list[float]:
        found = self._list("scores", int | float)
        if len(found) != len(self.tokens):
            raise ConfigError(
                f"the GGUF file has {len(self.tokens)} tokens, but scores of {len(found)}; "
                "download it again"
            )
        return found

    def _list(self, key: str, kind: Any) -> list[Any]:
        found = self.get(key)
        if found is None:
            return []
        if not isinstance(found, Sequence) or isinstance(found, str):
            raise ConfigError(f"tokenizer.ggml.{key} is {type(found).__name__}, and no list")
        if not all(issubclass(one, kind) for one in set(map(type, found))):
            raise ConfigError(f"tokenizer.ggml.{key} has other values than the format's")
        return list(found)


def _byte_level(said: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return byte pairs over the bytes of pieces, as GPT-2 has them."""
    name = said.get("pre", "default")
    split: Split | None = SPLITS.get(name)
    if split is None:
        raise ConfigError(
            f"tokenizer.ggml.pre {name!r} is not supported; supported are "
            f"{', '.join(sorted(SPLITS))}: give the tokenizer of the original model, by "
            "transformers.AutoTokenizer"
        )
    found = Tokenizer(
        models.BPE(vocab=said.ids, merges=said.merges(), ignore_merges=split.takes_whole)
    )
    cuts = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in split.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    found.decoder = decoders.ByteLevel()
    return found, split.adds_bos


def _sentencepiece(said: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return pairs of pieces, the best score first, as SentencePiece has them."""
    scores = said.scores()
    pairs = [
        (-scores[index], index, cut)
        for token, index in said.ids.items()
        if said.types[index] not in {_CONTROL, _UNKNOWN}
        for cut in range(1, len(token))
        if token[:cut] in said.ids and token[cut:] in said.ids
    ]
    merges = [(said.tokens[i][:cut], said.tokens[i][cut:]) for _, i, cut in sorted(pairs)]
    has_prefix = bool(said.get("add_space_prefix", True))
    found = Tokenizer(_raw(said, merges))
    spaces = [normalizers.Replace(" ", _SPACE)]
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    found.normalizer = normalizers.Sequence([*prefix, *spaces])
    ending = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    found.decoder = _raw_decoder(*ending)
    return found, True


def _gemma(said: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return pairs of characters by rank within a line, spaces being a character."""
    found = Tokenizer(_raw(said, said.merges()))
    found.normalizer = normalizers.Replace(" ", _SPACE)
    found.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), behavior="isolated")
    found.decoder = _raw_decoder()
    return found, True


def _raw(said: _Vocabulary, merges: list[tuple[str, str]]) -> models.BPE:
    """Return byte pairs over characters; a piece that is no token becomes its bytes."""
    unknown = said.special("unknown")
    return models.BPE(
        vocab=said.ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
    )


def _raw_decoder(*ending: Any) -> Any:
    spaces = decoders.Replace(_SPACE, " ")
    return decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), *ending])


def _frame(found: Tokenizer, said: _Vocabulary, *, adds_bos: bool) -> None:
    """Let texts begin and end with tokens of their own where the file wants it."""
    bos, eos = said.special("bos"), said.special("eos")
    before = [bos] if said.get("add_bos_token", adds_bos) and bos is not None else []
    after = [eos] if said.get("add_eos_token", False) and eos is not None else []
    if not before and not after:
        return
    found.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{one}:1" for one in before), "$B:1"]
        + [f"{one}:1" for one in after],
        special_tokens=[(token, said.ids[token]) for token in {*before, *after}],
    )


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    usual = metadata.get(_TEMPLATE)
    others = {
        key.removeprefix(f"{_TEMPLATE}."): value
        for key, value in metadata.items()
        if key.startswith(f"{_TEMPLATE}.") and isinstance(value, str)
    }
    if not isinstance(usual, str):
        return others or None
    return {"default": usual, **others} if others else usual


_MODELS: Mapping[Any, Callable[[_Vocabulary], tuple[Tokenizer, bool]]] = {
    "gemma4": _gemma,
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
