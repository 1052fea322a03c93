"""Errors of transformers and tokenizers over a checkpoint's files, as the project's own."""

import linecache
import math
import os
import re
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import tokenizers
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open

from moecache.errors import (
    ConfigError,
    FormatError,
    MissingDependencyError,
    MoeCacheError,
    StoreError,
)
from moecache.stores._checkpoint import TOP_K_NAMES
from moecache.stores._header import MAX_LAYERS

# The files of a model that `from_pretrained` reads.
FILES = ("*.safetensors", "generation_config.json", "config.json")
# Letters of another program's message that ours repeats: it may quote what a file has.
_SHOWN = 400
_SIZES = re.compile(r"(^|[._])((num|n)_(\w+_)?(layers|blocks|labels)|depth)$")
# transformers makes a name for each label.
_MOST_LABELS = 2**20
_FIELDS = re.compile(r"\b(config|text_config|self)\.([a-z]\w*)")
# A GPU that fails is no damage either.
_PASSED = (MoeCacheError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)

# The directories of installed packages and of Python's own modules.
_LIBRARIES = (
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(str(Path(str(package.__file__)).parents[1]) for package in (transformers, torch)),
)


class Damage:
    """A call of transformers over a checkpoint's files; its errors name the file.

    A `FormatError` then, and a `StoreError` where a file is missing or cannot be read. Errors of
    moecache's own code and of the host's (a streamer, say), which transformers may call, are no
    damage: they pass, as do `MemoryError` and interrupts.

    Parameters
    ----------
    path : str or Path
        The checkpoint.
    doing : str
        The task of transformers, such as "read the tokenizer".
    *files : str
        The files that it reads. That is named which cannot be read by itself, else the last.
    arguments : collection of str, optional
        Names of what the caller gave to it: an error that names one is no damage, but a
        `ConfigError`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        doing: str,
        *files: str,
        arguments: Collection[str] = (),
    ) -> None:
        self._path = Path(path)
        self._doing = doing
        self._files = files
        self._arguments = arguments

    def __enter__(self) -> None:
        """Begin the call."""

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Raise what the call's error means."""
        # tokenizers' panics are no Exception.
        is_panic = type(error).__name__ == "PanicException"
        if error is None or not (isinstance(error, Exception) or is_panic):
            return
        if isinstance(error, _PASSED) or traceback is None or _is_ours(traceback):
            return
        said = describe(error)
        if "can't allocate memory" in said:
            raise MemoryError(f"{self._path}: {said}") from error
        if isinstance(error, ImportError):
            raise MissingDependencyError(f"{self._path}: {said}") from error
        if isinstance(error, OSError) and "valid JSON" not in said:
            raise StoreError(f"{self._path}: {said}") from error
        for name in self._arguments:
            if f"`{name}" in said:
                raise ConfigError(f"{name} cannot be used: {said}") from error
        raise FormatError(
            f"{self._blamed()}: transformers cannot {self._doing}{_values_of(traceback)}: {said}; "
            "is it damaged, or of another model?"
        ) from error

    def _blamed(self) -> Path:
        """Return the file at fault."""
        if self._files and self._path.is_dir():
            for name in self._files[:-1]:
                for path in sorted(self._path.glob(name)):
                    try:
                        _READ[name](path)
                    except OSError:
                        pass
                    except Exception:  # noqa: BLE001 - the same error once more
                        return path
        return self._path / self._files[-1] if self._files else self._path


def _read_weights(path: Path) -> None:
    with safe_open(path, framework="pt"):
        pass


_READ: Mapping[str, Callable[[Path], object]] = {
    "config.json": lambda path: transformers.AutoConfig.from_pretrained(path.parent),
    "generation_config.json": (
        lambda path: transformers.GenerationConfig.from_pretrained(path.parent)
    ),
    "tokenizer.json": lambda path: tokenizers.Tokenizer.from_file(str(path)),
    "*.safetensors": _read_weights,
}


def describe(error: BaseException) -> str:
    """Return what another program's error says, on one line and not too long."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    # Without its class another message may be a bare name.
    if not isinstance(error, (OSError, ImportError, ValueError, StrictDataclassError)) or not text:
        text = f"{name}: {text}" if text else name
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# The largest number of bfloat16, rounded down.
_MOST_VALUE = 3.38e38


def check_sizes(path: str | os.PathLike[str], config: dict[str, Any]) -> None:
    """Raise a FormatError for more layers than any model has, which would be built for hours.

    So is a number beyond bfloat16, and of experts for a token one below zero, where torch would
    fail once a token is computed.
    """
    for name, value in _numbers(config, ""):
        if _MOST_VALUE < abs(value) < math.inf:
            raise FormatError(
                f"{Path(path) / 'config.json'}: {name} is {str(value)[:20]}; no weight is so large"
            )
        if value < 0 and name.rpartition(".")[2] in TOP_K_NAMES:
            raise FormatError(
                f"{Path(path) / 'config.json'}: {name} is {str(value)[:20]}; a token goes to one "
                "expert at least"
            )
        most = _MOST_LABELS if name.endswith("labels") else MAX_LAYERS
        if value > most and _SIZES.search(name):
            raise FormatError(
                f"{Path(path) / 'config.json'}: {name} is {str(value)[:20]}; no model has more "
                f"than {most}"
            )


def check_generation(path: str | os.PathLike[str], config: Any) -> None:
    """Raise a FormatError for what no text can be generated with, before a prompt is read."""
    for what, (is_one, names) in _GENERATION.items():
        for name in names.split():
            value = getattr(config, name, None)
            values = value if what.endswith("a list") and isinstance(value, list) else [value]
            if value is not None and not all(map(is_one, values)):
                raise FormatError(
                    f"{Path(path) / 'generation_config.json'}: {name} must be {what}, "
                    f"got {ascii(value)[:40]}"
                )


def _is_whole(value: object) -> bool:
    return type(value) is int and abs(value) < 2**63


def _is_number(value: object) -> bool:
    return _is_whole(value) or isinstance(value, float)


# Fields of a generation configuration by their types, which transformers does not check.
_GENERATION: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "a token's number, or a list": (_is_whole, "eos_token_id pad_token_id bos_token_id"),
    "a whole number": (
        _is_whole,
        (
            "max_length max_new_tokens min_length min_new_tokens top_k num_beams "
            "num_return_sequences no_repeat_ngram_size prefill_chunk_size"
        ),
    ),
    "a number": (
        _is_number,
        (
            "temperature top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty "
            "length_penalty guidance_scale max_time"
        ),
    ),
    "true or false": (
        lambda value: value in (0, 1),
        (
            "do_sample use_cache output_attentions output_hidden_states output_scores "
            "output_logits return_dict_in_generate renormalize_logits"
        ),
    ),
}


def _numbers(level: dict[str, Any], path: str) -> Iterator[tuple[str, float]]:
    for key, value in level.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict):
            yield from _numbers(value, name)
        elif isinstance(value, int | float):
            yield name, value
        elif isinstance(value, list) and key in TOP_K_NAMES:  # a number for each layer
            yield from ((name, one) for one in value if isinstance(one, int | float))


def _is_ours(traceback: TracebackType) -> bool:
    """Return whether this package's code, or the host's, was at work: called by the call."""
    # The first frame has the call itself.
    inner = traceback.tb_next
    while inner is not None:
        name = inner.tb_frame.f_globals.get("__name__", "")
        file = inner.tb_frame.f_code.co_filename
        # Libraries made the code whose file name is in <>.
        is_library = file.startswith(("<", *_LIBRARIES)) or name.startswith("transformers_modules")
        if name.startswith("moecache.") or not is_library:
            return True
        inner = inner.tb_next
    return False


def _values_of(traceback: TracebackType) -> str:
    """Return the fields of a configuration on the line that failed, with their values."""
    inner: TracebackType | None = traceback
    found: dict[str, Any] = {}
    kinds = (transformers.PretrainedConfig, transformers.GenerationConfig)
    while inner is not None:
        frame = inner.tb_frame
        line = linecache.getline(frame.f_code.co_filename, inner.tb_lineno, frame.f_globals)
        # The innermost line that names any counts.
        fields = {
            field: getattr(frame.f_locals[holder], field)
            for holder, field in _FIELDS.findall(line)
            if isinstance(frame.f_locals.get(holder), kinds)
            and field in vars(frame.f_locals[holder])
        }
        found = fields or found
        inner = inner.tb_next
    shown = (f"{field}={ascii(value)[:40]}" for field, value in found.items())
    return f" with {', '.join(shown)}" if found else ""
