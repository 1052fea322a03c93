"""What `bench.faithful` compares with: the dequantized model, with every operation in float64."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PROMPT, NEW_TOKENS = 20, 24


@dataclass(frozen=True)
class Text:
    """A prompt and the greedy tokens after it, and what the reference computed at each place.

    The last token is not read, so there are `PROMPT + NEW_TOKENS - 1` places.

    Parameters
    ----------
    tokens : list of int
        `PROMPT + NEW_TOKENS` of them.
    logits : ndarray of float64, shape (places, vocabulary)
    scores : ndarray of float64, shape (places, layers, experts)
        Those by which the router chooses.
    experts : ndarray of int, shape (places, layers, top_k)
        Those that it chose, in any order.
    """

    tokens: list[int]
    logits: np.ndarray
    scores: np.ndarray
    experts: np.ndarray

    def first_other_choice(self, experts: np.ndarray) -> tuple[int, float | None]:
        """Return the first place at which another choice was made, and how far apart the two were.

        Parameters
        ----------
        experts : ndarray of int, shape (places, layers, top_k)
            As `Text.experts`.

        Returns
        -------
        place : int
            The number of places, if all choices are the same.
        gap : float or None
            The difference of the scores of the experts that were left out and taken instead, in
            the first layer at that place.
        """
        assert experts.shape == self.experts.shape, (experts.shape, self.experts.shape)
        other = (np.sort(experts, -1) != np.sort(self.experts, -1)).any(-1)
        if not other.any():
            return len(other), None
        place = int(other.any(-1).argmax())
        layer = int(other[place].argmax())
        scores = self.scores[place, layer]
        left_out = scores[np.setdiff1d(self.experts[place, layer], experts[place, layer])]
        taken = scores[np.setdiff1d(experts[place, layer], self.experts[place, layer])]
        return place, float(left_out.max() - taken.min())


class Reference:
    """Transformers' model of a file's dequantized values.

    Parameters
    ----------
    file : pathlib.Path
        A GGUF file of a model whose routers choose the `top_k` highest scores of all experts.

    Attributes
    ----------
    types : dict of str to int
        How many matrices are in each type but float32; a stack of experts is one.
    """

    def __init__(self, file: Path) -> None:
        from tests.helpers.gguf_models import build_from, read_gguf

        metadata, tensors = read_gguf(file)
        self.types = _types(file)
        self._model = build_from(metadata, tensors).double()
        # torch's products by groups are not for float64.
        self._model.set_experts_implementation("eager")
        self._chosen: list[tuple[np.ndarray, np.ndarray]] = []
        routers = [m for m in self._model.modules() if "Router" in type(m).__name__]
        for router in routers:
            router.register_forward_hook(self._note)
        self._num_layers = len(routers)

    def texts(self, number: int) -> list[Text]:
        """Return random prompts, the same each time, each with the greedy tokens after it."""
        import torch

        vocabulary = self._model.config.vocab_size
        tokens = np.random.default_rng(0).integers(3, vocabulary, (number, PROMPT))
        logits, scores, experts = [], [], []
        cache, given = None, tokens
        for _ in range(NEW_TOKENS):
            self._chosen.clear()
            with torch.inference_mode(), in_float64():
                out = self._model(torch.tensor(given), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits.numpy())
            assert logits[-1].dtype == np.float64
            for noted, kind in ((scores, 0), (experts, 1)):
                layers = [layer[kind].reshape(*given.shape, -1) for layer in self._chosen]
                noted.append(np.stack(layers, 2))
            given = logits[-1][:, -1:].argmax(-1)
            tokens = np.concatenate([tokens, given], 1)
        arrays = [np.concatenate(parts, 1) for parts in (logits, scores, experts)]
        return [Text(tokens[at].tolist(), *(array[at] for array in arrays)) for at in range(number)]

    def _note(self, router: Any, _: Any, found: Any) -> None:
        """Note the scores of a router's choice, and the choice."""
        scores, experts = found[0].numpy(), found[-1].numpy()
        assert scores.dtype == np.float64
        bias = getattr(router, "e_score_correction_bias", None)
        if bias is not None:
            scores = 1 / (1 + np.exp(-scores)) + bias.numpy()
        highest = np.sort(np.argsort(scores, -1)[:, -experts.shape[1] :], -1)
        assert np.array_equal(highest, np.sort(experts, -1)), type(router).__name__
        self._chosen.append((scores, experts))


def in_float64() -> Any:
    """Return a context in which torch computes in float64 what models cast to float32."""
    import torch
    from torch.overrides import TorchFunctionMode

    def swap(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    class InFloat64(TorchFunctionMode):
        """Norms, rotations and routers cast to float32, whatever the model's dtype is."""

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            func = torch.Tensor.double if func is torch.Tensor.float else func
            named = {name: swap(value) for name, value in (kwargs or {}).items()}
            return func(*map(swap, args), **named)

    return InFloat64()


def _types(file: Path) -> dict[str, int]:
    import gguf

    kinds = [tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors]
    found = Counter(kinds).most_common()
    # Norms, biases and routers.
    return {kind: number for kind, number in found if kind != "F32"}
