"""Small vocabularies trained here, as the metadata of GGUF files, and texts to compare by."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

TEXTS = (
    "Hello, world!",
    "  two spaces, a\ttab\nand lines\n\n\nand more   \n  indented\r\n",
    "I'm sure they'LL've said we'd don't 'sdm 'Tis",
    "1234567 12 3.14159 0x1F 1,000,000 ½ ²³ Ⅷ ٣٤٥",
    "for i in range(10):\n    print(f'{i}: {x[i]}')  # comment\n\treturn a//b\n",
    "Größe naïve façade ÉCOLE résumé Ωμέγα Москва кОшКа",
    "漢字かな交じり文と中文混合,한국어도 있습니다。",
    "مرحبا بالعالم हिन्दी में लिखा ไทย",
    "🎉🎊 emoji 👨‍👩‍👧‍👦 and 🇩🇪",
    "camelCase HTTPServer XMLHttpRequest snake_case SCREAMING",
    "<|im_start|>user\nhi<|im_end|>\n<think> so </think> x",
    "a/b/c\n/d ../e \\n $x = 3; --- *** ### @@ !!! ?!",
    "e\u0301 combining a\u0308o\u0308 z\u0335w",
    " ",
    "",
    "\n",
    "x" * 40,
)
_CORPUS = (
    *TEXTS,
    "the quick brown fox jumps over the lazy dog and then the dog says hello to the fox",
    "def function(self, value): return self.value + value if value is not None else 0",
    "Words that are common are merged into tokens; numbers such as 12 345 6789 are not.",
    "It's what we've got: they're here, I'd say, you'll see that he'S DON'T.",
    "中文的文字没有空格 日本語もそうです 漢字 한국어 있습니다 Москва привет как дела",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level(pre: str, *, num_tokens: int = 700) -> dict[str, Any]:
    """Return the metadata of a byte-level vocabulary whose texts are cut in one of the ways."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    from moecache.decoding.files.splits import SPLITS

    made = Tokenizer(models.BPE())
    cuts = [pre_tokenizers.Split(Regex(one), "isolated") for one in SPLITS[pre].patterns]
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, rest])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, initial_alphabet=sorted(alphabet), show_progress=False
    )
    made.train_from_iterator(_CORPUS * 3, trainer)
    return {
        **_vocabulary("gpt2", [*_tokens(made), *SPECIAL, "<think>", "</think>"], 3),
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": _merges(made),
    }


def sentencepiece(*, num_tokens: int = 500, **flags: Any) -> dict[str, Any]:
    """Return the metadata of a vocabulary with scores, of pieces and of single bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator(
        [text for text in _CORPUS * 3 if text.isascii() and "<" not in text],
        trainers.BpeTrainer(vocab_size=num_tokens, show_progress=False),
    )
    learned = ["".join(merge.split(" ")) for merge in _merges(made)]
    single = sorted({character for token in learned for character in token})
    pieces = list(dict.fromkeys([*learned, *single]))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(index) for index in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": flag for name, flag in flags.items()},
    }


def gemma(*, num_tokens: int = 600) -> dict[str, Any]:
    """Return the metadata of a vocabulary of characters, spaces among them, and single bytes."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), "isolated")
    made.train_from_iterator(
        [text for text in _CORPUS * 3 if text.isascii() and "<" not in text],
        trainers.BpeTrainer(vocab_size=num_tokens, show_progress=False),
    )
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *_tokens(made)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *dict.fromkeys(tokens)]
    kinds = [3, 3, 3, 2] + [6] * 256 + [1] * (len(tokens) - 260)
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.merges": _merges(made),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }


def _vocabulary(model: str, tokens: list[str], special: int) -> dict[str, Any]:
    first = len(tokens) - special - 2
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * first + [3] * special + [4, 4],
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + special - 1,
        "tokenizer.ggml.padding_token_id": first,
    }


def _tokens(made: Any) -> list[str]:
    ids = made.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def _merges(made: Any) -> list[str]:
    import json

    return [" ".join(merge) for merge in json.loads(made.to_str())["model"]["merges"]]


def vocabularies() -> Mapping[str, Callable[[], dict[str, Any]]]:
    """Return what makes the metadata of a vocabulary of each kind, by its name."""
    from moecache.decoding.files.splits import SPLITS

    return {
        **{name: partial(byte_level, name) for name in SPLITS},
        "gemma": gemma,
        "sentencepiece": sentencepiece,
        "sentencepiece without prefix": partial(sentencepiece, add_space_prefix=False),
    }
