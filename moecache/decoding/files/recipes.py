"""Recipes of files: what a model's layers compute, as its files say it."""

from collections.abc import Callable

import numpy as np

from moecache.decoding.files._facts import Facts
from moecache.decoding.files._layers import LayerReader
from moecache.decoding.files._tensors import FACTORS, check_tensors, trunk_names
from moecache.decoding.files.angles import frequencies
from moecache.decoding.files.described import TensorStore
from moecache.decoding.files.known import NoTextModelError
from moecache.decoding.files.trunk import EMBEDDING, HEAD, Trunk, held_bytes
from moecache.decoding.gguf.describing import describe_gguf
from moecache.decoding.recipe import Recipe
from moecache.decoding.room import room_behind
from moecache.decoding.safetensors.describing import describe_checkpoint
from moecache.kernels import SlotKernel
from moecache.sizing.headroom import STATE_PLACES
from moecache.stores import CheckpointStore, GgufStore, SafetensorsStore

# Factors from which on nothing is turned.
_STILL = 1e10


class FileModel:
    """What files say of their model, as far as a recipe takes it.

    Parameters
    ----------
    store : CheckpointStore
        Of a GGUF file, or of safetensors.

    Attributes
    ----------
    tensors, settings, ends, drawn, own_layers, state_type, transposed
        As `Described` has them.
    facts : Facts
    num_layers, context : int
        Layers; positions that a text may have.
    gate : mapping
        How experts' gates are computed: options of `SlotKernel`.

    Raises
    ------
    NoTextModelError
        If it takes more than a recipe of files says.
    ConfigError
        If the metadata are malformed.
    StoreError
        If a file beside the weights cannot be read; a FormatError if one is damaged.
    """

    def __init__(self, store: CheckpointStore) -> None:
        if isinstance(store, GgufStore):
            found = describe_gguf(store)
        elif isinstance(store, SafetensorsStore):
            found = describe_checkpoint(store)
        else:
            raise NoTextModelError(f"{type(store).__name__} runs with torch")
        self.settings, family, known = found.settings, found.family, found.known
        self.facts = facts = Facts(self.settings, family, known)
        self.gate, self._pairs = known.gate, found.pairs
        self.num_layers, self.context = facts.num_layers, facts.context
        self.ends, self.drawn, self.own_layers = found.ends, found.drawn, found.own_layers
        self.transposed = found.transposed
        self.state_type = found.state_type
        self.tensors: TensorStore = found.tensors
        self._check()
        tables = [
            frequencies(rope, heads.turned)
            for rope, heads in zip(facts.ropes.values(), facts.all_heads(), strict=True)
        ]
        self._frequencies = np.concatenate([found for found, _ in tables])
        self._turn_scales = np.concatenate([np.full(len(found), scale) for found, scale in tables])
        if family.is_beside and FACTORS in self.tensors.tensor_shapes:
            self._check_factors()

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding, too."""
        return HEAD not in self.tensors.tensor_shapes

    @property
    def trunk_bytes(self) -> int:
        """Bytes of the trunk in memory."""
        return held_bytes(self.tensors, self.names())

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values, in bfloat16."""
        blocks = range(self.num_layers)
        held = [self.facts.held(block) for block in blocks if self.facts.has_keys(block)]
        return sum(2 * heads * (width + value_width) for heads, width, value_width in held)

    @property
    def state_bytes(self) -> int:
        """Bytes of a text's states, in all places."""
        linear = self.facts.linear
        num_layers = sum(map(self.facts.is_linear, range(self.num_layers)))
        return 0 if linear is None else STATE_PLACES * num_layers * linear.nbytes

    def prompt_bytes(self, num_tokens: int) -> int:
        """Return the memory that a program takes for so many tokens of a prompt, about."""
        facts = self.facts
        heads = max(
            (facts.num_heads + each.num_kv_heads) * (each.width + each.value_width)
            for each in facts.all_heads()
        )
        latents = facts.num_heads * sum(facts.held(0)) if facts.rank is not None else 0
        if facts.linear is not None:
            heads = max(heads, facts.linear.channels + 2 * facts.linear.values)
        has_dense = facts.family.is_beside or any(map(facts.is_dense, range(facts.num_layers)))
        dense = max(facts.shared_width, facts.dense_width if has_dense else 0)
        # Rows of experts and their inputs; queries, keys, values and what is made of them; the
        # shared expert's; hidden states; and what of all that is converted.
        widths = facts.top_k * (facts.hidden_size + 2 * facts.expert_width)
        widths += 2 * heads + latents + 4 * dense + 8 * facts.hidden_size
        if facts.family.gates:
            widths += facts.num_heads * facts.all_heads()[0].width + facts.hidden_size
        return 4 * num_tokens * widths

    def check_room(self, num_tokens: int) -> int:
        """Return how many tokens fit behind so many.

        Raises
        ------
        ConfigError
            If none does.
        """
        room = room_behind(num_tokens, self.context)
        assert room is not None
        return room

    def names(self) -> list[str]:
        """Return the names of the trunk's tensors, in the order of the file."""
        return trunk_names(self.tensors.tensor_shapes, self.num_layers)

    def angles(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines and sines of positions, float32 [num_positions, num_angles] each."""
        turned = positions[:, None].astype(np.float32) * self._frequencies
        return np.cos(turned) * self._turn_scales, np.sin(turned) * self._turn_scales

    def recipe(self, trunk: Trunk, kernel_of: Callable[[int], tuple[int, SlotKernel]]) -> Recipe:
        """Return the recipe.

        Parameters
        ----------
        trunk : Trunk
            With the tensors of `names`.
        kernel_of : callable (block)
            Returns a block's layer in the runtime, and what computes its experts.
        """
        blocks = range(self.num_layers)
        head = EMBEDDING.removesuffix(".weight") if self.is_tied else "output"
        reader = LayerReader(self.facts, trunk, self._pairs)
        return Recipe(
            self.facts.hidden_size,
            tuple(reader.layer(block, kernel_of) for block in blocks),
            reader.norm(self.facts.known.out_norm),
            trunk.linear(head),
            self.facts.embedding_scale,
            float(self.settings.get("logits_scaling", 1.0)),
            self.settings.get("final_logit_softcapping"),
            product_type="f32" if self.tensors.is_f32 else "bf16",
        )

    def _check(self) -> None:
        """Refuse what a recipe here does not say, and tensors that are not those of its model."""
        facts, window = self.facts, self.settings.get("sliding_window")
        if window is not None and not 2 <= window < 2**31:
            raise NoTextModelError(f"a window of {window} positions is torch's to refuse")
        num_groups, num_kept = facts.groups
        size = facts.num_experts // num_groups
        if num_kept < num_groups and (
            facts.top_k > num_kept * size or size < facts.family.num_best
        ):
            raise NoTextModelError(
                f"{facts.top_k} experts of {num_kept} groups of {size} are torch's to choose"
            )
        if facts.family.scales_input and facts.top_k > 1:
            raise NoTextModelError(f"inputs of {facts.top_k} experts of a token have scales")
        if self.settings.get("num_kv_shared_layers") or self.settings.get(
            "hidden_size_per_layer_input"
        ):
            raise NoTextModelError("layers that share keys, or have inputs of their own")
        if not any(map(facts.has_keys, range(facts.num_layers))):
            raise NoTextModelError("no layer has keys and values")
        for heads in facts.all_heads():
            least = 0 if facts.is_still else 2
            if facts.hidden_size < 1 or heads.turned < least or heads.turned % 2:
                raise NoTextModelError(f"{heads.turned} numbers of a head cannot be turned")
        check_tensors(self.tensors, facts)

    def _check_factors(self) -> None:
        """Look whether a file's factors turn the pairs that its family turns, and no others."""
        found = self.tensors.read_tensor(FACTORS)
        is_turned = self._frequencies[: len(found)] != 0
        if (found[is_turned] != 1).any() or not (found[~is_turned] >= _STILL).all():
            raise NoTextModelError(f"{FACTORS} has other factors than this family's")
