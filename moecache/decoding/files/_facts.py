"""Facts of a model of files: its sizes and choices, whatever its family calls them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moecache.decoding.attending import Temperature
from moecache.decoding.families import Family
from moecache.decoding.files.angles import sharpness
from moecache.decoding.files.known import Known

# Of transformers' models, whatever a file says of other norms; and where files say nothing.
LATENT_EPSILON = 1e-6
_NORM_MIN = 1e-12
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# Kinds of layers that hold states, and those that are a feed-forward alone.
_STATEFUL, _FORWARD = ("linear_attention", "conv"), ("moe", "mlp")
_MISSING: Any = object()
# Names of the sizes of layers that hold states, in the order of `LinearSizes`.
_DELTA = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
_NEMOTRON = ("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel")
_GRANITE = ("n_groups", "n_heads", "d_state", "d_head", "d_conv")
# Of models whose heads know no positions.
_STILL: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 1.0}


Shapes = Mapping[str, tuple[int, ...]]
Wanted = Iterator[tuple[str, tuple[int, ...]]]


class Heads(NamedTuple):
    """Sizes of a layer's attention: heads of keys, and numbers of a query and of a value.

    The first `turned` numbers are turned by the position; `first_angle` is which of a position's
    angles is their first one's.
    """

    num_kv_heads: int
    width: int
    value_width: int
    turned: int
    first_angle: int


class LinearSizes(NamedTuple):
    """Sizes of a layer that holds states, as `LinearAttention` and `StateSpace` have them.

    A wide one is a `DeltaAttention`. A convolution alone is as one head without a state.
    """

    num_keys: int
    num_heads: int
    width: int
    value_width: int
    kernel: int
    is_space: bool = False
    by_channel: bool = False

    @property
    def values(self) -> int:
        """Numbers of all heads' values."""
        return self.num_heads * self.value_width

    @property
    def channels(self) -> int:
        """Numbers that go through the convolution."""
        return 2 * self.num_keys * self.width + self.values

    @property
    def nbytes(self) -> int:
        """Bytes of what a layer holds of a text, once, in float32."""
        return 4 * (self.width * self.values + (self.kernel - 1) * self.channels)


class Facts:
    """What a model's settings say, by one name each.

    Parameters
    ----------
    settings : mapping
        As transformers' configuration has them.
    family : Family
    known : Known

    Attributes
    ----------
    hidden_size, vocabulary, num_layers, context : int
        Positions that a text may have are the last.
    num_heads : int
        Heads of queries, at most.
    heads_of_layers : sequence of int
        Those of each layer.
    num_experts, top_k : int
    rank : int or None
        Numbers of a latent that keys and values are made of.
    latent_size : int or None
        Numbers of the latents that experts are given, if they are.
    low_rank : int or None
        Numbers that queries are made of, if there are some between.
    linear : LinearSizes or None
        Sizes of layers that hold states, if there may be such layers.
    """

    def __init__(self, settings: Mapping[str, Any], family: Family, known: Known) -> None:
        self.settings, self.family, self.known = settings, family, known
        self.hidden_size: int = settings["hidden_size"]
        self.vocabulary: int = settings["vocab_size"]
        self.num_layers: int = settings["num_hidden_layers"]
        self.context = _context(settings)
        self.heads_of_layers: Sequence[int] = settings.get(
            "num_attention_heads_per_layer", [settings["num_attention_heads"]] * self.num_layers
        )
        self.num_heads = max(self.heads_of_layers)
        self.top_k: int = self._first("num_experts_per_tok", "top_k_experts")
        self.num_experts: int = self._first(
            "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
        )
        self.rank: int | None = settings.get("kv_lora_rank")
        self.latent_size: int | None = settings.get("moe_latent_size")
        self.low_rank: int | None = settings.get("q_lora_rank")
        self.linear = _linear_sizes(settings)
        # Rotations, by the kind of layer, or of all of them.
        turns = settings.get("position_embedding_type", "rope") == "rope"
        rope = settings.get("rope_parameters", _STILL) if turns else _STILL
        self.ropes: Mapping[str, Mapping[str, Any]] = (
            {"": rope} if "rope_type" in rope else dict(sorted(rope.items()))
        )
        self._heads = {kind: self._heads_of(kind) for kind in self.ropes}

    def heads(self, block: int) -> Heads:
        """Return the sizes of a layer's attention, if it has keys and values."""
        if "" in self._heads:
            return self._heads[""]
        kinds = self.settings.get("rope_kinds")
        if kinds is None:
            return self._heads[str(self._kind(block))]
        # A layer that turns nothing has the heads of any other.
        return self._heads[kinds[block] or next(iter(self._heads))]

    def all_heads(self) -> list[Heads]:
        """Return those of all kinds of layers, in the order of their angles."""
        return list(self._heads.values())

    def held(self, block: int) -> tuple[int, int, int]:
        """Return heads, and numbers of a key and of a value, that a position leaves behind."""
        heads = self.heads(block)
        if self.rank is not None:
            return 1, self.rank, self.settings["qk_rope_head_dim"]
        return heads.num_kv_heads, heads.width, heads.value_width

    def scale(self, block: int) -> float:
        """Return what multiplies products of queries and keys."""
        said = self.settings.get("attention_multiplier", self.known.scale)
        if said is not None:
            return float(said)
        rope = next(iter(self.ropes.values()))
        # Of latents alone, whatever another family's rotation says.
        is_stretched = self.rank is not None and rope["rope_type"] != "default"
        stretched = is_stretched and rope.get("mscale_all_dim")
        factor = sharpness(rope["factor"], rope["mscale_all_dim"]) if stretched else 1.0
        return float(self.heads(block).width ** -0.5 * factor * factor)

    @property
    def embedding_scale(self) -> float:
        """What multiplies embeddings."""
        is_scaled = self.family.is_beside or self.settings.get("mup_enabled")
        usual = self.hidden_size**0.5 if is_scaled else 1.0
        return float(self.settings.get("embedding_multiplier", usual))

    @property
    def is_biased(self) -> bool:
        """Whether queries, keys and values have biases."""
        return any(self.settings.get(key) for key in ("attention_bias", "qkv_bias"))

    @property
    def has_head_norms(self) -> bool:
        """Whether queries and keys have norms."""
        return bool(self.known.head_norms) and bool(self.settings.get("use_qk_norm", True))

    @property
    def has_norms_before(self) -> bool:
        """Whether attention and feed-forward are given norms of hidden states."""
        return self.family.layer_norms is not None

    @property
    def is_still(self) -> bool:
        """Whether queries and keys are not turned by positions."""
        return any(rope is _STILL for rope in self.ropes.values())

    @property
    def may_have_factors(self) -> bool:
        """Whether a rotation may have factors for texts of any length."""
        return self.family.is_beside or any(
            rope["rope_type"] == "llama3" for rope in self.ropes.values()
        )

    @property
    def has_long_factors(self) -> bool:
        """Whether a rotation has factors for short texts, and others for long ones."""
        return any(rope["rope_type"] == "longrope" for rope in self.ropes.values())

    @property
    def epsilon(self) -> float:
        """What norms add to the mean of squares."""
        return float(self._first("rms_norm_eps", "norm_eps", "layer_norm_epsilon"))

    @property
    def expert_width(self) -> int:
        """Rows of an expert's gate."""
        return int(self._first("moe_intermediate_size", "intermediate_size"))

    @property
    def expert_size(self) -> int:
        """Numbers of an expert's input."""
        return self.latent_size or self.hidden_size

    @property
    def dense_width(self) -> int:
        """Rows of the gate of a layer without experts."""
        return int(self._first("intermediate_size_mlp", "intermediate_size"))

    @property
    def shared_width(self) -> int:
        """Rows of the gate of what all tokens use beside their experts; 0 if there is nothing."""
        if self.family.shared is None:
            return 0
        widths = ("moe_shared_expert_intermediate_size", "shared_intermediate_size")
        own = self._first(*widths, usual=None)
        if own is not None:
            return int(own)
        counts = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
        usual = self.settings.get("shared_expert_intermediate_size", self.expert_width)
        count = self._first(*counts, usual=None)
        return int(usual if count is None else count * self.expert_width)

    @property
    def groups(self) -> tuple[int, int]:
        """Groups of experts, and of how many groups a token uses experts."""
        said = self.settings
        if not self.family.has_groups or said.get("topk_method") == "greedy":
            return 1, 1
        return said["n_group"], said["topk_group"]

    @property
    def needs_correction(self) -> bool:
        """Whether a router's scores have a correction: other families' are zeros in some files."""
        return bool(self.settings.get("use_expert_bias", self.known.has_correction))

    @property
    def is_normalized(self) -> bool:
        """Whether experts' weights are divided by their sum."""
        said = self.family.is_normalized
        return bool(self.settings[said]) if isinstance(said, str) else said

    @property
    def floor(self) -> float:
        """Least of that sum."""
        return 0.0 if self.family.floor is None else _NORM_MIN

    @property
    def experts_scale(self) -> float:
        """What multiplies experts' weights."""
        names = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
        return float(self._first(*names, "moe_routed_scaling_factor", usual=1.0))

    @property
    def jitter(self) -> float:
        """As `Router` has it; 0 for those without."""
        return float(self.settings.get("router_jitter_noise", 0.0))

    def has_values(self, block: int) -> bool:
        """Return whether a layer's values are not its keys'."""
        return not (self.settings.get("attention_k_eq_v") and self._kind(block) == _FULL)

    def is_linear(self, block: int) -> bool:
        """Return whether a layer holds states instead of keys and values."""
        return self.linear is not None and self._kind(block) in _STATEFUL

    @property
    def has_states(self) -> bool:
        """Whether there are layers that hold states."""
        return any(map(self.is_linear, range(self.num_layers)))

    def has_keys(self, block: int) -> bool:
        """Return whether a layer holds keys and values."""
        return not self.is_linear(block) and self._kind(block) not in _FORWARD

    def has_forward(self, block: int) -> bool:
        """Return whether a layer has experts or a feed-forward."""
        return not self.family.is_single or self._kind(block) in _FORWARD

    def is_dense(self, block: int) -> bool:
        """Return whether a layer has no experts."""
        said = self.settings
        if "first_k_dense_replace" in said:
            return bool(block < said["first_k_dense_replace"])
        if "moe_layer_start_index" in said:
            start, end = said["moe_layer_start_index"], said["moe_layer_end_index"]
            return not (start <= block <= end and (block + 1) % said["moe_layer_interval"] == 0)
        if "moe_layers" in said:
            return block not in said["moe_layers"]
        if "num_dense_layers" in said:
            return bool(block < said["num_dense_layers"])
        if self.family.is_single:
            return self._kind(block) == "mlp"
        if "mlp_layer_types" in said:
            return bool(said["mlp_layer_types"][block] == "dense")
        return block in said.get("mlp_only_layers", ())

    def window(self, block: int) -> int | None:
        """Return how many positions a layer's tokens see; `None` if it is all of them."""
        kind = self._kind(block)
        size = "attention_chunk_size" if kind == _CHUNKED else "sliding_window"
        return None if kind == _FULL else self.settings.get(size)

    def is_chunked(self, block: int) -> bool:
        """Return whether a layer's tokens see only positions of their own chunk of the window."""
        return self._kind(block) == _CHUNKED

    def turned(self, block: int) -> int:
        """Return how many numbers of a layer's queries and keys are turned by positions."""
        turns = self.settings.get("no_rope_layers")  # 0 for a layer that turns nothing
        is_still = self.family.turns_windows and self.window(block) is None
        is_still |= turns is not None and not turns[block]
        kinds = self.settings.get("rope_kinds")  # `None` for a layer that turns nothing
        is_still |= kinds is not None and kinds[block] is None
        return 0 if is_still else self.heads(block).turned

    def temperature(self, block: int) -> Temperature | None:
        """Return by what a layer's queries are scaled by their position, if they are."""
        rope = next(iter(self.ropes.values()))
        beta = rope.get("llama_4_scaling_beta")
        if beta:
            length = rope["original_max_position_embeddings"]
            return Temperature(float(length), float(beta), is_own=True)
        if "attn_scale" not in self.settings or self.turned(block):
            return None
        return Temperature(float(self.settings["floor_scale"]), float(self.settings["attn_scale"]))

    def _first(self, *names: str, usual: Any = _MISSING) -> Any:
        """Return the setting that goes by one of some names."""
        found = (self.settings[name] for name in names if name in self.settings)
        return next(found) if usual is _MISSING else next(found, usual)

    def _heads_of(self, kind: str) -> Heads:
        said, rope = self.settings, self.ropes[kind]
        # Angles of other kinds come first.
        before = [self._heads_of(other).turned for other in self.ropes if other < kind]
        first = sum(before) // 2
        if self.rank is not None:
            content, more = said["qk_nope_head_dim"], said["qk_rope_head_dim"]
            turned = 0 if rope is _STILL else more
            return Heads(1, content + more, said["v_head_dim"], turned, first)
        num, width = said["num_key_value_heads"], said.get("head_dim")
        if kind == _FULL and "global_head_dim" in said:
            num, width = said["num_global_key_value_heads"], said["global_head_dim"]
        if kind == _SLIDING:
            num = said.get("swa_num_key_value_heads", num)
        width = width or self.hidden_size // self.num_heads
        value_width = said.get("v_head_dim", width)
        if rope is _STILL:
            return Heads(num, width, value_width, 0, first)
        share = 1.0 if rope["rope_type"] == "proportional" else rope.get("partial_rotary_factor", 1)
        return Heads(num, width, value_width, int(width * share), first)

    def _kind(self, block: int) -> str | None:
        kinds = self._first("layer_types", "layers_block_type", usual=None)
        return None if kinds is None else kinds[block]


def _context(said: Mapping[str, Any]) -> int:
    """Return how many positions a text may have.

    A rotation with other factors for long texts turns all of their positions by these. A text's
    length would have to be known before its first token is read: texts are short ones.
    """
    found: int = said["max_position_embeddings"]
    rope = said.get("rope_parameters", _STILL)
    if rope.get("rope_type") != "longrope" or rope["short_factor"] == rope["long_factor"]:
        return found
    return min(found, rope["original_max_position_embeddings"])


def _linear_sizes(said: Mapping[str, Any]) -> LinearSizes | None:
    """Return the sizes of layers that hold states, as the settings of their kind have them."""
    spaces: dict[str, tuple[str, ...]] = {
        "linear_num_key_heads": tuple(f"linear_{name}" for name in _DELTA),
        "ssm_state_size": _NEMOTRON,
        "mamba_d_state": tuple(f"mamba_{name}" for name in _GRANITE),
    }
    for mark, names in spaces.items():
        if mark in said:
            keys, heads, width, value_width, kernel = (said[name] for name in names)
            is_space = not mark.startswith("linear")
            return LinearSizes(keys, heads, width, value_width, kernel, is_space)
    if "linear_head_dim" in said:
        heads, width = said["linear_num_heads"], said["linear_head_dim"]
        kernel = said["linear_conv_kernel_dim"]
        return LinearSizes(heads, heads, width, width, kernel, by_channel=True)
    if "conv_L_cache" in said:
        return LinearSizes(0, 1, 0, said["hidden_size"], said["conv_L_cache"])
    return None
