"""Rotary positions' angles of a model of files, as transformers has them."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def frequencies(rope: Mapping[str, Any], width: int) -> tuple[np.ndarray, np.float32]:
    """Return the angle of one position for each pair of numbers, and what scales cosines and sines.

    Su et al., RoFormer, 2021; of "yarn" Peng et al., YaRN, 2023; of "longrope" Ding et al.,
    LongRoPE, 2024.

    Parameters
    ----------
    rope : mapping
        As transformers' `rope_parameters`, of type "default", "linear", "yarn", "proportional",
        "llama3", with all its `factors` or with what they are made of, or "longrope", whose
        factors are those of a text that is no longer than those of training.
    width : int
        Numbers of a head that are turned.

    Returns
    -------
    ndarray of float32, shape [width / 2]
    float32
    """
    base = np.float32(rope["rope_theta"])
    found = np.float32(1) / base ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    kind, one = rope["rope_type"], np.float32(1)
    if kind == "default":
        return found, one
    if kind == "proportional":
        # The others are not turned.
        found[int(rope["partial_rotary_factor"] * width // 2) :] = 0
        return found, one
    if kind == "longrope":
        return found / np.array(rope["short_factor"], np.float32), np.float32(_turn_scale(rope))
    if kind == "llama3" and "factors" in rope:
        return found / np.array(rope["factors"], np.float32), one
    if kind == "llama3":
        return _llama3(found, rope), one
    slow = found / np.float32(rope["factor"])
    if kind == "linear":
        return slow, one
    low, high = (_pair_of(rope, turns, width) for turns in (rope["beta_fast"], rope["beta_slow"]))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    # Pairs that turn often keep their angles; those that never turn once have a factor's part.
    pairs = np.arange(width // 2, dtype=np.float32)
    ramp = (pairs - np.float32(low)) / np.float32((high - low) or 0.001)
    kept = one - np.clip(ramp, np.float32(0), one)
    return slow * (one - kept) + found * kept, np.float32(_turn_scale(rope))


def _llama3(found: np.ndarray, rope: Mapping[str, Any]) -> np.ndarray:
    """Return frequencies of which slow ones are slower, and those between partly.

    Grattafiori et al., The Llama 3 Herd of Models, 2024, as transformers computes it.
    """
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, length = (np.float32(rope[name]) for name in names)
    waves = np.float32(2 * math.pi) / found
    is_slow, is_quick = waves > length / low, waves < length / high
    slow = np.where(is_slow, found / factor, found)
    if low == high:
        return slow
    part = (length / waves - low) / (high - low)
    return np.where(is_slow | is_quick, slow, (np.float32(1) - part) * slow / factor + part * slow)


def sharpness(factor: float, multiplier: float = 1.0) -> float:
    """Return by how much attention to a longer text is sharper: YaRN, section 3.4."""
    return 0.1 * multiplier * math.log(factor) + 1 if factor > 1 else 1.0


def _turn_scale(rope: Mapping[str, Any]) -> float:
    """Return what scales cosines and sines; DeepSeek has its factor elsewhere."""
    said = rope.get("attention_factor")
    if said is not None:
        return float(said)
    factor = rope["factor"]
    own, all_of = rope.get("mscale"), rope.get("mscale_all_dim")
    if own and all_of:
        return sharpness(factor, own) / sharpness(factor, all_of)
    return sharpness(factor)


def _pair_of(rope: Mapping[str, Any], turns: float, width: int) -> float:
    """Return which pair turns so often within the length that the model was trained with."""
    length = rope["original_max_position_embeddings"]
    return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))
