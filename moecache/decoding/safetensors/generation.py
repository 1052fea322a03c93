"""generation_config.json: how a model's texts are drawn, and where they end."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moecache.decoding.files.known import NoTextModelError
from moecache.decoding.safetensors._config import Config
from moecache.decoding.sampler import Sampling
from moecache.errors import ConfigError
from moecache.stores._checkpoint import read_config

# Fields that `Sampling` has, and those that say nothing of one text.
SAMPLED = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
OTHERS = (
    *("max_length", "max_new_tokens", "max_time", "num_return_sequences", "use_cache"),
    *("cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict_in_generate", "pad_token_id", "bos_token_id", "eos_token_id"),
    *("transformers_version", "compile_config", "disable_compile", "early_stopping"),
    *("decoder_start_token_id", "length_penalty", "prompt_lookup_num_tokens"),
)
# What transformers draws by where a file says that it draws, and not how.
_USUAL: Mapping[str, Any] = {"top_k": 50}
# Values that ask for nothing, beside those that are false.
_NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "typical_p", "guidance_scale"), 1),
    "encoder_repetition_penalty": 1,
}


def read_generation(path: Path, config: Config) -> tuple[frozenset[int], dict[str, Any]]:
    """Return the tokens that end a text, and fields of `Sampling`.

    Raises
    ------
    NoTextModelError
        If texts are to be drawn as transformers alone does.
    FormatError
        If the file is not JSON.
    """
    said = read_config(path)
    for name, value in said.items():
        if name in (*SAMPLED, *OTHERS) or name.startswith("_"):
            continue
        if value and value != _NEUTRAL.get(name):
            raise NoTextModelError(f"{name} in {path.name} is torch's to heed")
    ends = said.get("eos_token_id")
    ends = config.whole("eos_token_id") if ends is None else ends
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(token) is int and token >= 0 for token in listed):
        raise NoTextModelError(f"eos_token_id is {str(ends)[:80]}, which is torch's to make out")
    drawn = {name: said[name] for name in SAMPLED if said.get(name) is not None}
    does_sample = bool(drawn.pop("do_sample", False))
    drawn = {**_USUAL, **drawn}
    if not does_sample:
        # Files may name a temperature that is not used.
        drawn["temperature"] = 0.0
    try:
        Sampling(**drawn)
    except (ConfigError, TypeError) as error:
        raise NoTextModelError(f"{path.name}: {error}") from error
    return frozenset(listed), drawn
