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
        Whether a piece that is a token stays one, even against the merges.
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
# Letters that are large or small, as an older Unicode had them.
_OLD_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\uab68"
    r"\x{10570}-\x{105bc}\x{16e40}-\x{1df1e}]]"
)
_LINES = r"[\r\n]"
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK = Split(
    (
        _LINES,
        rf"\s?{_OLD_CASED}+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _ASIAN,
        r"\p{N}+",
    )
)
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

# Words with single spaces between them, of languages that have some.
_EXAONE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_EASTERN = (
    "[\u0e40-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u2f00-\u2fdf\u3040-\u30ff"
    "\u3400-\u4dbf\u4e00-\ufaff\uff65-\uff9f]+"
)
# Digits by three from the end on. In llama.cpp the last of several spaces before one is apart.
_AFMOE = Split(
    (
        r"[^\S\r\n](?=\p{N})",
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        _EASTERN,
        _DEEPSEEK3_WORD,
    )
)

SPLITS: Mapping[str, Split] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "pixtral", "lfm2"), _LLAMA),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "hunyuan", "stablelm2", "grok-2"), _QWEN2),
    **dict.fromkeys(("gpt-2", "olmo", "mpt"), Split((_GPT2,))),
    **dict.fromkeys(("refact", "starcoder", "smollm", "command-r"), _DIGITS),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _DEEPSEEK3),
    **dict.fromkeys(("bailingmoe", "bailingmoe2"), Split((_BAILING,))),
    "afmoe": _AFMOE,
    "exaone-moe": Split((_EXAONE,)),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": Split((_LINES, r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")),
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
