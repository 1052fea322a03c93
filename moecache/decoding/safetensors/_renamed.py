"""RenamedStore: a checkpoint's tensors by the names that GGUF files have for the same ones."""

import re
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np

from moecache.decoding.files.known import Known, NoTextModelError
from moecache.decoding.files.trunk import EMBEDDING, HEAD
from moecache.layout import ExpertLayout
from moecache.stores import CheckpointStore
from moecache.stores._matrices import Matrix
from moecache.stores._quantized import BESIDE

_LAYER = re.compile(r"(.*?)layers\.(\d{1,9})\.(.*)")
_HEAD = re.compile(r"(?:.*\.)?lm_head\.(weight|bias)")
_OUT_NORMS = ("norm", "embedding_norm", "norm_f")
_EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "embeddings.weight")
# Of families with norms behind both parts.
_PART_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_mlp_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Modules of a layer, and parameters that are no module's weight or bias.
_MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{
        f"self_attn.{part}_layernorm": f"attn_{part[0]}_norm" for part in ("q", "k", "query", "key")
    },
    "self_attn.out_proj": "attn_output",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    **{f"conv.{part}": f"shortconv.{part}" for part in ("in_proj", "conv", "out_proj")},
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.router": "ffn_gate_inp",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"feed_forward.w{i}": f"ffn_{part}" for i, part in enumerate(("gate", "down", "up"), 1)},
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.router.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "shared_mlp.input_linear": "ffn_gate_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "self_attn.gate_proj": "attn_gate",
    # Kimi's delta attention; Ling's has other names for it, and one for gates of any layer.
    **{
        f"{at}.{own}": name
        for at in ("self_attn", "attention")
        for own, name in {
            **{f"{part}_proj": f"attn_{part}" for part in "qkv"},
            **{f"{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
            **{f"{part}_{one}_proj": f"ssm_{part}_{one}" for part in "fg" for one in "ab"},
            "f_proj": "ssm_f_a",
            "g_proj": "attn_gate",
            "b_proj": "ssm_beta",
            "o_norm": "ssm_norm",
            "dense": "attn_output",
            "kv_a_proj_with_mqa": "attn_kv_a_mqa",
            "kv_a_layernorm": "attn_kv_a_norm",
            "kv_b_proj": "attn_kv_b",
        }.items()
    },
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    # Older releases of transformers write dense layers of Kimi Linear as those of experts.
    **{
        f"{block}.{part}_proj": f"ffn_{part}"
        for block in ("mlp", "block_sparse_moe")
        for part in ("gate", "up", "down")
    },
    **{
        f"{shared}.{part}_proj": f"ffn_{part}_shexp"
        for shared in (
            *("mlp.shared_expert", "mlp.shared_experts", "mlp.shared_mlp"),
            *("feed_forward.shared_expert", "block_sparse_moe.shared_experts"),
        )
        for part in ("gate", "up", "down")
    },
}
# Of state spaces, and of one part a layer, whatever it is.
_MIXERS = {
    "norm": "attn_norm",
    "mixer.gate": "ffn_gate_inp",
    **{f"mixer.{part}_proj": f"attn_{part}" for part in "qkv"},
    "mixer.o_proj": "attn_output",
    **{
        f"{module}.{own}": f"ssm_{name}"
        for module in ("mixer", "mamba")
        for own, name in {
            "in_proj": "in",
            "out_proj": "out",
            "conv1d": "conv1d",
            "norm": "norm",
        }.items()
    },
    **{f"mixer.{part}_proj": f"ffn_{part}" for part in ("up", "down")},
    **{f"mixer.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("up", "down")},
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
# Of a feed-forward beside experts.
_BESIDE = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    **{f"post_feedforward_layernorm{part}": f"post_ffw_norm{part}" for part in ("", "_1", "_2")},
    "router.proj": "ffn_gate_inp",
}
# Gate and up in one, and what they are called.
_BOTH = "shared_mlp.input_linear.weight"
_HALVES = (".ffn_gate_shexp.weight", ".ffn_up_shexp.weight")
_CORRECTION = "exp_probs_b.bias"
_STATEFUL = ("linear_attn", "self_attn", "attention", "mixer", "mamba")
_PARAMETERS = {
    **{f"self_attn.{name}": "attn_sinks.weight" for name in ("sinks", "attention_sink_bias")},
    **{
        f"{module}.e_score_correction_bias": _CORRECTION
        for module in (
            *("mlp", "mlp.gate", "mlp.moe_statics", "mlp.experts", "mixer.gate"),
            *("block_sparse_moe", "block_sparse_moe.gate"),
        )
    },
    "mlp.expert_bias": _CORRECTION,
    "mlp.gate.expert_bias": _CORRECTION,
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "feed_forward.expert_bias": _CORRECTION,
    **{f"{module}.A_log": "ssm_a" for module in _STATEFUL},
    **{f"{module}.dt_bias": "ssm_dt.bias" for module in _STATEFUL},
    **{f"{module}.D": "ssm_d" for module in ("mixer", "mamba")},
}
# Norms of the residual stream, of queries and of keys.
_NORMS = re.compile(
    r"output_norm\.weight|blk\.\d+\.(?:attn(?:_q|_k)?_norm|post_attention_norm|ffn_norm)\.weight"
)
_CONVOLUTION = re.compile(r"\.(?:ssm_conv1d(?:_[qkv])?|shortconv\.conv)\.weight$")
# What is computed from config.json, and what guesses further tokens.
_UNUSED = re.compile(r"(?:.*\.)?(?:rotary_emb\.inv_freq|mtp(?:_\w+)?\..*)")


class RenamedStore:
    """What `FileModel` and `Trunk` ask a store of GGUF, of one of safetensors.

    Norms that a family weights by 1 and more have the 1 in them, and decays are numbers instead of
    logarithms, as in GGUF files.

    Parameters
    ----------
    store : CheckpointStore
    known : Known
    num_layers : int
        Layers that the model runs.
    adds_one : bool
        Whether norms are weighted by 1 and more.
    has_wide_routers : bool
        Whether routers are multiplied in float32.
    num_norms : int
        Groups of a state space's output, each with a norm; 0 without state spaces.
    is_beside : bool
        As `Family` has it.
    is_tied : bool
        Whether the embedding is the head if the checkpoint has none.
    transposed : collection of str
        Roles that are stored as [in, out].

    Attributes
    ----------
    own_layers : list of str
        Layers with experts that the model runs, as the checkpoint names them.
    layout : ExpertLayout
        Theirs.
    tensor_shapes, tensor_types : dict of str to tuple of int, and to str
    trunk_matrices : dict of str to (Matrix, list of str)
        As a store of GGUF has them.
    """

    def __init__(
        self,
        store: CheckpointStore,
        known: Known,
        *,
        num_layers: int,
        adds_one: bool,
        has_wide_routers: bool,
        num_norms: int,
        is_beside: bool,
        is_tied: bool,
        transposed: Collection[str],
    ) -> None:
        self._num_norms = num_norms
        self._store, self._num_layers, self._adds_one = store, num_layers, adds_one
        self._has_wide_routers = has_wide_routers
        usual = {"post_attention_layernorm": known.forward_norm}
        if known.sum_norm is not None:
            usual["post_mlp_layernorm"] = known.sum_norm
        norms = _PART_NORMS if known.part_norms else _BESIDE if is_beside else usual
        self._modules = {**_MODULES, **_MIXERS, **norms}
        self._out_norm = known.out_norm
        self.own_layers, self.layout = _own_layers(
            store.layout.with_transposed(transposed), num_layers
        )
        self._prefix = next(iter(self.own_layers)).partition("layers.")[0]
        self._names = self._renamed(is_tied=is_tied)
        self.trunk_matrices: dict[str, tuple[Matrix, list[str]]] = {
            name: store.trunk_matrices[own]
            for name, own in self._names.items()
            if own in store.trunk_matrices
        }
        self.tensor_shapes: dict[str, tuple[int, ...]] = {}
        self.tensor_types: dict[str, str] = {}
        for name, own in self._names.items():
            if name in self.trunk_matrices:
                matrix, _ = self.trunk_matrices[name]
                self.tensor_shapes[name] = matrix.rows, matrix.columns
                self.tensor_types[name] = matrix.format.name
            else:
                entry = store.tensor_entry(own)
                self.tensor_shapes[name] = self._shape(name, own, entry.shape)
                changed = self._change(name) is not None
                self.tensor_types[name] = "F32" if changed else entry.dtype_name

    @property
    def is_f32(self) -> bool:
        """Whether products are of float32: nothing is stored in bfloat16."""
        plain = self._names.keys() - self.trunk_matrices.keys()
        stored = (self._store.tensor_entry(self._names[name]) for name in plain)
        return all(entry.dtype_name != "BF16" for entry in stored)

    def read_tensor(self, name: str) -> np.ndarray:
        """Return a tensor's numbers; of a quantized one, its values in float32."""
        own = self._names[name]
        if name in self.trunk_matrices:
            return self._store.read_matrix(own)
        found = self._store.read_tensor(own)
        if own.endswith(_BOTH):
            found = np.split(found, 2)[_HALVES.index(name[name.rindex(".ffn") :])]
        found = found.reshape(self.tensor_shapes[name])
        change = self._change(name)
        return found if change is None else change(found.astype(np.float32))

    def read_parts(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """Return the bytes of one of `trunk_matrices`."""
        return self._store.read_parts(self._names[name], out)

    def _renamed(self, *, is_tied: bool) -> dict[str, str]:
        """Return the checkpoint's own names of tensors, by GGUF's."""
        matrices = self._store.trunk_matrices
        parts = {part for _, names in matrices.values() for part in names} - matrices.keys()
        modules = {name.removesuffix(".weight") for name in matrices}
        found: dict[str, str] = {}
        for own in dict.fromkeys([*self._store.trunk_names, *matrices]):
            if own in parts or _UNUSED.fullmatch(own):
                continue
            if not own.startswith(self._prefix) and not _HEAD.fullmatch(own):
                continue  # of other parts: images, say
            module, _, leaf = own.rpartition(".")
            if module in modules and f"_{leaf.removeprefix('weight_')}" in BESIDE:
                continue
            name = self._name(own)
            if name in found:
                raise NoTextModelError(f"{own} and {found[name]} are one tensor of its family")
            found[name] = own
            if own.endswith(_BOTH):
                found[name.replace(*_HALVES)] = own
        if HEAD not in found and not is_tied:
            raise NoTextModelError("the head is no embedding, and there is no lm_head.weight")
        return found

    def _name(self, own: str) -> str:
        """Return a tensor's name; its own if none is known, which no model asks for."""
        if head := _HEAD.fullmatch(own):
            return f"{HEAD.removesuffix('weight')}{head.group(1)}"
        match = _LAYER.fullmatch(own)
        if match is None:
            rest = own.removeprefix(self._prefix)
            module, _, leaf = rest.rpartition(".")
            if module in _OUT_NORMS:
                return f"{self._out_norm}.{leaf}"
            return EMBEDDING if rest in _EMBEDDINGS else own
        _, layer, rest = match.groups()
        if int(layer) >= self._num_layers:
            return f"blk.{layer}.nextn.{rest}"
        if rest in _PARAMETERS:
            return f"blk.{layer}.{_PARAMETERS[rest]}"
        module, _, leaf = rest.rpartition(".")
        return f"blk.{layer}.{self._modules[module]}.{leaf}" if module in self._modules else own

    def _shape(self, name: str, own: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if _CONVOLUTION.search(name) and len(shape) == 3 and shape[1] == 1:
            return shape[0], shape[2]
        if name.endswith(_CORRECTION) and len(shape) == 2 and shape[0] == 1:
            return shape[1:]
        if own.endswith(_BOTH) and len(shape) == 2:
            return shape[0] // 2, shape[1]
        num = self._num_norms
        if num and name.endswith(".ssm_norm.weight") and shape[0] % num == 0:
            return num, shape[0] // num
        if name.endswith(".ssm_a") and shape[:2] == (1, 1):
            return shape[2:3]
        # A column of a number for each head.
        return (*shape, 1) if num and name.endswith((".ssm_a", ".ssm_d")) else shape

    def _change(self, name: str) -> Callable[[np.ndarray], np.ndarray] | None:
        if name.endswith(".ssm_a"):
            return lambda found: -np.exp(found)
        if self._adds_one and _NORMS.fullmatch(name):
            return lambda found: found + np.float32(1)
        if self._has_wide_routers and name.endswith(".ffn_gate_inp.weight"):
            return lambda found: found
        return None


def _own_layers(layout: ExpertLayout, num_layers: int) -> tuple[list[str], ExpertLayout]:
    """Return a model's own layers, without those that guess tokens, and their layout.

    Raises
    ------
    NoTextModelError
        If there is none, or several parts of the model have layers with experts.
    """
    found = {
        match.group(1, 2): (layer, name)
        for layer, name in enumerate(layout.layer_names)
        if (match := _LAYER.fullmatch(f"{name}.")) and int(match.group(2)) < num_layers
    }
    found = {key: one for key, one in found.items() if "mtp" not in key[0]}
    if len({prefix for prefix, _ in found}) != 1:
        raise NoTextModelError("no layers, or those of several parts, have experts")
    return [name for _, name in found.values()], replace(
        layout,
        layers=tuple(layout.layers[layer] for layer, _ in found.values()),
        layer_names=tuple(f"blk.{block}" for _, block in found),
    )
