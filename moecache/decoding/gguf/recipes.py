"""Recipes of GGUF files: what a file's layers compute, read from its metadata and tensors."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from moecache.decoding.families import FAMILIES, Family
from moecache.decoding.gguf import _softmax
from moecache.decoding.gguf._metadata import Metadata
from moecache.decoding.gguf.angles import frequencies
from moecache.decoding.gguf.trunk import EMBEDDING, HEAD, Trunk
from moecache.decoding.recipe import (
    Attention,
    FeedForward,
    Layer,
    Recipe,
    Rotation,
    Router,
)
from moecache.decoding.room import room_behind
from moecache.errors import ConfigError
from moecache.formats import StackedFormat
from moecache.kernels import SlotKernel, tiler
from moecache.kernels._kernels import Matrix, Tiler
from moecache.stores import GgufStore

# GGUF's architectures, and the first names of their rows in `FAMILIES`. All of them have tensors
# that are the model's own, name by name; where rows of heads are in another order than
# transformers', pairs that are turned together are neighbours.
_KNOWN = {
    "gpt-oss": (_softmax.GPT_OSS, "gpt_oss"),
    "llama": (_softmax.MIXTRAL, "mixtral"),
    "olmoe": (_softmax.OLMOE, "olmoe"),
    "qwen2moe": (_softmax.QWEN2MOE, "qwen2_moe"),
    "qwen3moe": (_softmax.QWEN3MOE, "qwen3_moe"),
    "qwen3vlmoe": (_softmax.QWEN3VLMOE, "qwen3_moe"),
}

_EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")


class NoTextModelError(ConfigError):
    """A file's model that runs with torch alone, and the reason."""


class FileModel:
    """What a GGUF file says of its model, as far as a recipe takes it.

    Parameters
    ----------
    store : GgufStore

    Attributes
    ----------
    settings : mapping
        As transformers' configuration has them.
    num_layers, context : int
        Layers; positions that a text may have.
    ends : frozenset of int
        Tokens with which the model ends its texts.
    gate : mapping
        How experts' gates are computed: options of `SlotKernel`.

    Raises
    ------
    NoTextModelError
        If it takes more than a recipe of a file says.
    ConfigError
        If the metadata are malformed.
    """

    def __init__(self, store: GgufStore) -> None:
        if store.architecture not in _KNOWN:
            raise NoTextModelError(f"architecture {store.architecture!r} runs with torch")
        said = Metadata(store.metadata, store.tensor_shapes)
        architecture, self._name = _KNOWN[store.architecture]
        self.settings: Mapping[str, Any] = architecture.settings(said)
        said.check_rest()
        row = next(key for key in FAMILIES if key[0] == self._name)
        self.family: Family = FAMILIES[row]
        self._pairs = (
            "neighbours" if architecture.source is _softmax.permuted_heads else self.family.pairs
        )
        is_gpt_oss = store.architecture == "gpt-oss"
        self.gate: Mapping[str, Any] = {"activation": "swiglu"} if is_gpt_oss else {}
        self._forward_norm = "post_attention_norm" if is_gpt_oss else "ffn_norm"
        self.num_layers: int = self.settings["num_hidden_layers"]
        self.context: int = self.settings["max_position_embeddings"]
        ends = self.settings.get("eos_token_id")
        self.ends = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self._store = store
        self._check()
        rope = self.settings["rope_parameters"]
        self._frequencies, self._turn_scale = frequencies(rope, self.width)

    @property
    def width(self) -> int:
        """Numbers of a head."""
        found: int = self.settings["head_dim"]
        return found

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        found: int = self.settings["num_key_value_heads"]
        return found

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding, too."""
        return HEAD not in self._store.tensor_shapes

    @property
    def trunk_bytes(self) -> int:
        """Bytes of the trunk in memory; an embedding that is the head, too, is there twice."""
        # Numbers of 16 bits that kernels do not multiply become float32.
        found = self._store.trunk_bytes * (1 + ("F16" in self._store.tensor_types))
        if not self.is_tied:
            return found
        rows, columns = self._store.tensor_shapes[EMBEDDING]
        known = self._store.trunk_matrices.get(EMBEDDING)
        twice = known[0].format.nbytes(rows, columns) if known else 4 * rows * columns
        return found + twice

    def prompt_bytes(self, num_tokens: int) -> int:
        """Return the memory that a program takes for so many tokens of a prompt, about."""
        said = self.settings
        hidden, top_k = said["hidden_size"], said["num_experts_per_tok"]
        heads = (said["num_attention_heads"] + self.num_kv_heads) * 2 * self.width
        shared = said.get("shared_expert_intermediate_size", 0)
        expert = said.get("moe_intermediate_size", said["intermediate_size"])
        # Rows of experts and their inputs; queries, keys, values and what is made of them; the
        # shared expert's; hidden states; and what of all that is converted.
        widths = top_k * (hidden + 2 * expert) + 2 * heads + 4 * shared + 8 * hidden
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
        return [name for name in self._store.tensor_shapes if not _EXPERTS.fullmatch(name)]

    def angles(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines and sines of positions, float32 [num_positions, width / 2] each."""
        turned = positions[:, None].astype(np.float32) * self._frequencies
        return np.cos(turned) * self._turn_scale, np.sin(turned) * self._turn_scale

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
        return Recipe(
            self.settings["hidden_size"],
            tuple(self._layer(trunk, block, kernel_of) for block in blocks),
            self._norm(trunk, "output_norm.weight"),
            trunk.linear(head),
        )

    def _norm(self, trunk: Trunk, name: str) -> Any:
        return trunk.norm(name, self.settings["rms_norm_eps"])

    def _layer(
        self, trunk: Trunk, block: int, kernel_of: Callable[[int], tuple[int, SlotKernel]]
    ) -> Layer:
        at = f"blk.{block}"
        router, experts, number, forward = None, None, -1, None
        if f"{at}.ffn_gate_inp.weight" in trunk:
            number, kernel = kernel_of(block)
            experts = kernel.experts
            router = Router(
                trunk.linear(f"{at}.ffn_gate_inp"),
                self.settings["num_experts_per_tok"],
                self.family.scores,
                is_normalized=self._is_normalized(),
            )
            if self.family.shared is not None:
                forward = self._feed_forward(trunk, at, "_shexp")
        else:
            forward = self._feed_forward(trunk, at, "")
        return Layer(
            self._norm(trunk, f"{at}.attn_norm.weight"),
            self._attention(trunk, block),
            self._norm(trunk, f"{at}.{self._forward_norm}.weight"),
            forward,
            router,
            experts,
            number,
        )

    def _attention(self, trunk: Trunk, block: int) -> Attention:
        at = f"blk.{block}"
        norms = [f"{at}.attn_{part}_norm.weight" for part in "qk"]
        query, key = (self._norm(trunk, name) if name in trunk else None for name in norms)
        width = self.width
        return Attention(
            trunk.linear(f"{at}.attn_q"),
            trunk.linear(f"{at}.attn_k"),
            trunk.linear(f"{at}.attn_v"),
            trunk.linear(f"{at}.attn_output"),
            num_heads=self.settings["num_attention_heads"],
            num_kv_heads=self.num_kv_heads,
            width=width,
            value_width=width,
            scale=width**-0.5,
            rotation=Rotation(width, self._pairs),
            query_norm=query,
            key_norm=key,
            clip=None if self.family.clip is None else self.settings.get(self.family.clip),
            sinks=None if self.family.sinks is None else trunk.numbers(f"{at}.attn_sinks.weight"),
            window=self._window(block),
        )

    def _window(self, block: int) -> int | None:
        kinds = self.settings.get("layer_types")
        sees_all = kinds is not None and kinds[block] == "full_attention"
        return None if sees_all else self.settings.get("sliding_window")

    def _feed_forward(self, trunk: Trunk, at: str, suffix: str) -> FeedForward:
        parts = (f"{at}.ffn_{part}{suffix}" for part in ("gate", "up", "down"))
        gate, up, down = map(trunk.linear, parts)
        weight = f"{at}.ffn_gate_inp{suffix}"
        has_weight = bool(suffix) and self.family.shared_weight is not None
        return FeedForward(gate, up, down, "silu", trunk.linear(weight) if has_weight else None)

    def _is_normalized(self) -> bool:
        said = self.family.is_normalized
        return bool(self.settings[said]) if isinstance(said, str) else said

    def _check(self) -> None:
        """Refuse what a recipe here does not say, and tensors that are not those of its model."""
        window = self.settings.get("sliding_window")
        if window is not None and not 1 <= window < 2**31:
            raise NoTextModelError(f"a window of {window} positions is torch's to refuse")
        if self.settings["hidden_size"] < 1 or self.width % 2:
            raise NoTextModelError(f"heads of {self.width} numbers cannot be turned")
        found = self._store.tensor_shapes
        wanted = dict(self._wanted(found))
        for name, shape in wanted.items():
            if name not in found:
                raise NoTextModelError(f"the file has no tensor {name}")
            # A matrix of one row may have lost it.
            if tuple(found[name]) != shape and (1, *found[name]) != shape:
                raise NoTextModelError(f"{name} is {list(found[name])}, and not {list(shape)}")
        routers = {name.rpartition(".ffn_")[0] for name in wanted if "ffn_gate_inp.w" in name}
        differing = routers ^ set(self._store.layout.layer_names)
        if differing:
            raise NoTextModelError(f"{min(differing)} has a router or experts, and not both")
        others = [name for name in self.names() if name not in wanted]
        if others:
            raise NoTextModelError(f"tensor {others[0]} is none of this model's")
        self._check_experts()
        for name, (matrix, _) in self._store.trunk_matrices.items():
            known = matrix.format
            is_computed = known.form is not None and not isinstance(known, StackedFormat)
            if matrix.is_tiled or not is_computed or not _has_kernel(known.name, matrix.columns):
                raise NoTextModelError(f"{name} in {known.name} runs with torch")
            if name == EMBEDDING and not isinstance(tiler(known.name, 1, matrix.columns), Tiler):
                raise NoTextModelError(f"rows in {known.name} are torch's to read")

    def _check_experts(self) -> None:
        wanted: dict[str, str | None] = {"gate_up": None, "down": None}
        if self.gate:
            wanted |= {"gate_up_bias": "gate_up", "down_bias": "down"}
        layout = self._store.layout
        for at, layer in zip(layout.layer_names, layout.layers, strict=True):
            roles = {role.name: role for role in layer}
            if roles.keys() != wanted.keys():
                raise NoTextModelError(f"{at}'s experts have {', '.join(roles)}")
            for name, role in roles.items():
                if not role.format and role.dtype.name not in ("float32", "bfloat16"):
                    raise NoTextModelError(f"{at}'s {name} in {role.dtype.name} runs with torch")
                of = wanted[name]
                if of is not None and role.shape != roles[of].shape[:1]:
                    raise NoTextModelError(f"{at}'s {name} is {list(role.shape)}")

    def _wanted(self, found: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the trunk's tensors and their shapes; a head as the file has it."""
        hidden, vocabulary = self.settings["hidden_size"], self.settings["vocab_size"]
        heads = self.settings["num_attention_heads"] * self.width
        keys = self.num_kv_heads * self.width
        yield EMBEDDING, (vocabulary, hidden)
        yield "output_norm.weight", (hidden,)
        if HEAD in found:
            yield HEAD, (vocabulary, hidden)
        biased: tuple[str, ...] = ()
        if self.settings.get("attention_bias") or self.settings.get("qkv_bias"):
            biased = ("attn_q", "attn_k", "attn_v")
        if self.settings.get("attention_bias"):
            biased = (*biased, "attn_output")
        norms = {"olmoe": (heads, keys), "qwen3_moe": (self.width, self.width)}
        for block in range(self.num_layers):
            at = f"blk.{block}"
            if self.family.sinks is not None:
                yield f"{at}.attn_sinks.weight", (self.settings["num_attention_heads"],)
            for name in ("attn_norm", self._forward_norm):
                yield f"{at}.{name}.weight", (hidden,)
            projections = {
                "attn_q": (heads, hidden),
                "attn_k": (keys, hidden),
                "attn_v": (keys, hidden),
                "attn_output": (hidden, heads),
            }
            for name, shape in projections.items():
                yield f"{at}.{name}.weight", shape
                if name in biased:
                    yield f"{at}.{name}.bias", shape[:1]
            if self._name in norms:
                for part, width in zip("qk", norms[self._name], strict=True):
                    yield f"{at}.attn_{part}_norm.weight", (width,)
            yield from self._wanted_forward(at, found)

    def _wanted_forward(
        self, at: str, found: Mapping[str, Any]
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, settings = self.settings["hidden_size"], self.settings
        router = f"{at}.ffn_gate_inp.weight"
        if router not in found and "mlp_only_layers" in settings:
            width, suffix = settings["intermediate_size"], ""
        else:
            num_experts = settings.get("num_experts") or settings["num_local_experts"]
            yield router, (num_experts, hidden)
            if self.gate:
                yield f"{at}.ffn_gate_inp.bias", (num_experts,)
            if self.family.shared is None:
                return
            width, suffix = settings["shared_expert_intermediate_size"], "_shexp"
            yield f"{at}.ffn_gate_inp_shexp.weight", (1, hidden)
        yield f"{at}.ffn_gate{suffix}.weight", (width, hidden)
        yield f"{at}.ffn_up{suffix}.weight", (width, hidden)
        yield f"{at}.ffn_down{suffix}.weight", (hidden, width)


def _has_kernel(name: str, columns: int) -> bool:
    try:
        Matrix(64, name, 1, columns)  # an address that nothing is read from
    except ConfigError:
        return False
    return True
