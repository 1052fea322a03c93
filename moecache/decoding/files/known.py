"""What a recipe has to know of files, beside what they say."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moecache.decoding.families import FAMILIES, Family
from moecache.errors import ConfigError

if TYPE_CHECKING:
    from moecache.decoding.gguf._architecture import Architecture
    from moecache.decoding.gguf._metadata import Metadata

# The name of the tensor that corrects a router's scores.
CORRECTION = "exp_probs_b.bias"


class NoTextModelError(ConfigError):
    """A file's model that runs with torch alone, and the reason."""


@dataclass(frozen=True)
class Known:
    """An architecture, and its files' ways that its row in `FAMILIES` does not say.

    Tensors are the model's own, name by name; where rows of heads are in another order than
    transformers', pairs that are turned together are neighbours.

    Parameters
    ----------
    architecture : Architecture, or callable (Metadata)
        Which returns one.
    forward_norm, out_norm : str
        Tensors of the norms before a feed-forward, and before the head.
    part_norms : (str, str), optional
        Tensors of the norms of what a layer's attention, and what its feed-forward, gives.
    sum_norm : str, optional
        Tensor of the norm of what experts, and the feed-forward beside them, give. Layers without
        experts may have one that is not used.
    has_layer_norms : bool
        Whether norms take the mean off, and have biases.
    head_norms : {"", "each", "all", "plain"}
        Whether queries and keys have norms: of each head, of all of them at once, or of each head
        that is turned, without weights.
    has_out_bias : bool
        Whether what attention gives has a bias if queries have.
    gate : mapping
        How experts' gates are computed: options of `SlotKernel`.
    has_gates : bool
        Whether feed-forwards have gates; else they are down(act(up(x))).
    has_correction : bool
        Whether scores of experts have a correction; else zeros stand for one that a file lacks.
    has_expert_biases : bool
        Whether experts and their router have biases.
    scale : float, optional
        What multiplies products of queries and keys; by default 1 / sqrt(width).
    is_tiled : bool
        As `LinearAttention` has it.
    is_factored : bool
        Whether decays and gates of a `DeltaAttention` are two products, one behind the other.
    """

    architecture: "Architecture | Callable[[Metadata], Architecture]"
    forward_norm: str = "ffn_norm"
    out_norm: str = "output_norm"
    part_norms: tuple[str, str] | None = None
    sum_norm: str | None = None
    has_layer_norms: bool = False
    head_norms: str = ""
    has_out_bias: bool = True
    gate: Mapping[str, Any] = field(default_factory=dict)
    has_gates: bool = True
    has_correction: bool = False
    has_expert_biases: bool = False
    scale: float | None = None
    is_tiled: bool = False
    is_factored: bool = False

    def find(self, said: "Metadata") -> "Architecture":
        """Return the architecture that a file is of."""
        found = self.architecture
        return found(said) if callable(found) else found


def family_of(prefix: str) -> Family | None:
    """Return the row of the attention of transformers' classes; `None` if there is none."""
    wanted = {f"{prefix}{part}Attention" for part in ("", "Text")}
    return next((row for (_, kind, _), row in FAMILIES.items() if kind in wanted), None)
