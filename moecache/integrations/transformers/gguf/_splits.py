"""How texts are cut before byte pairs are merged: by the name that GGUF files have for it."""

from collections.abc import Mapping
from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Letters of words that begin with capitals, and go on with small ones.
_CAPITALS, _SMALL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(first: str, rest: str, ending: str = "") -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}[{first}]*[{rest}]+{ending}|{start}[{first}]+[{rest}]*{ending}"


@dataclass(frozen=True)
class Split:
    """How a text is cut.

    Parameters
    ----------
    patterns : tuple of str
        Regular expressions, applied one after another: each match is a piece, and so is what
        is between two.
    takes_whole : bool
        Whether a piece that is a token stays one, whatever the merges are.
    adds_bos : bool
        Whether texts begin with a token of their own, if the file does not say it.
    """

    patterns: tuple[str, ...]
    takes_whole: bool = False
    adds_bos: bool = False


_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = Split((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}",))
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT4O = Split(
    (rf"{_cased(_CAPITALS, _SMALL, _CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}",)
)
_DEEPSEEK3_WORD = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK3 = Split((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_WORD))
_LLAMA = Split((_LLAMA3,), takes_whole=True, adds_bos=True)
_DIGITS = Split((r"\p{N}", _GPT2))
_NO_HAN = r"&&[^\p{Han}]"
_KIMI = (
    rf"\p{{Han}}+|{_cased(_CAPITALS + _NO_HAN, _SMALL + _NO_HAN, _CONTRACTIONS + '?')}"
    rf"|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)

SPLITS: Mapping[str, Split] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "pixtral", "lfm2"), _LLAMA),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "hunyuan", "stablelm2", "grok-2"), _QWEN2),
    **dict.fromkeys(("gpt-2", "olmo", "mpt"), Split((_GPT2,))),
    **dict.fromkeys(("refact", "starcoder", "smollm", "command-r"), _DIGITS),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    **dict.fromkeys(("bailingmoe", "bailingmoe2"), Split((_BAILING,))),
    "dbrx": Split((_LLAMA3,)),
    "smaug-bpe": Split((_LLAMA3,)),
    "chatglm-bpe": Split((_LLAMA3,)),
    "glm4": Split((_LLAMA3,), takes_whole=True),
    "qwen35": Split((_QWEN35,)),
    "tekken": Split(
        (rf"{_cased(_CAPITALS, _SMALL)}|\p{{N}}|{_PATHS}|{_SPACES}",),
        takes_whole=True,
        adds_bos=True,
    ),
    "kimi-k2": Split((_KIMI,)),
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
