"""Llama 4 and Phi MoE: the factors of their rotations are a tensor of the file."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from moecache.decoding.gguf import _factored
from moecache.decoding.gguf._metadata import Metadata


def _llama4(said: Metadata) -> dict[str, Any]:
    settings = _factored.llama4_settings(said)
    parameters = settings["rope_parameters"]
    factors = parameters.pop("factors", None)
    if factors is not None:
        settings["rope_parameters"] = _llama3(said, parameters, np.array(factors, np.float32))
    return settings


def _llama3(said: Metadata, parameters: dict[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """Return the parameters of Llama 3's rotation that has such factors.

    Short waves are not changed, long ones are stretched by a factor, and those between by a share
    of it that is linear in their frequency: two of them say where it begins and ends. If there are
    fewer, several rotations have these factors, and any of them is right.
    """
    width, theta, largest = 2 * len(factors), parameters["rope_theta"], float(factors.max())
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    waves = 2 * math.pi / frequencies
    between = np.flatnonzero((factors > 1) & (factors < largest))
    ratio, length = 1.0, math.sqrt(waves[factors == 1].max(initial=1.0))
    length *= math.sqrt(waves[factors == largest].min(initial=waves[-1]))
    if len(between):
        ends = between[[0, -1]]
        # A share is (length / wave - low) / (high - low), and low is 1.
        shares = (1 / factors[ends].astype(np.float64) - 1 / largest) / (1 - 1 / largest)
        ratio, slope = 4.0, (shares[0] + 1 / 3) * waves[ends[0]]
        if len(between) > 1:
            slope = (shares[0] - shares[1]) / (frequencies[ends[0]] - frequencies[ends[1]])
            slope *= 2 * math.pi
            ratio = 1 + 1 / max(slope / waves[ends[0]] - shares[0], 1e-9)
        length = slope * (ratio - 1)
    if not length < _factored.LONGEST:
        raise said.unsupported("rope.freq_base", theta)
    for digits in (3, 5, 8):  # the number of fewest is the one that was written
        found = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": largest,
            "low_freq_factor": 1.0,
            "high_freq_factor": float(f"{ratio:.{digits}e}"),
            "original_max_position_embeddings": max(round(float(f"{length:.{digits}e}")), 1),
        }
        if np.allclose(_llama3_factors(found, width), factors, rtol=1e-6, atol=0.0):
            return found
    raise said.unsupported("rope_freqs.weight", [float(one) for one in factors])


def _llama3_factors(parameters: dict[str, Any], width: int) -> np.ndarray:
    """Return the factors that llama.cpp's converter writes for such parameters."""
    largest, low, high = (
        parameters[key] for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    length = parameters["original_max_position_embeddings"]
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    waves = 2 * math.pi / (1.0 / (parameters["rope_theta"] ** exponents))
    shares = (length / waves - low) / (high - low) if high > low else torch.zeros_like(waves)
    found = 1 / ((1 - shares) / largest + shares)
    found = torch.where(waves > length / low, largest, found)
    values: np.ndarray = torch.where(waves < length / high, 1.0, found).numpy()
    return values


LLAMA4 = replace(_factored.LLAMA4, settings=_llama4, ignored=(r"rope_freqs\.weight",))
PHIMOE = replace(_factored.PHIMOE, ignored=(r"rope_factors_(short|long)\.weight",))
