"""Tiny random models as GGUF files, written as llama.cpp's converter writes them, and read back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tests.helpers import family_settings as tiny

# Parameters by transformers' names, without "model.layers.3." -> tensors without "blk.3.".
_TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class GgufModel:
    """A model architecture at a size that is built in milliseconds.

    Parameters
    ----------
    architecture : str
        What GGUF files call it.
    prefix : str
        What the names of its classes in transformers begin with.
    settings : mapping
        What its configuration is given.
    keys : callable
        Returns the keys, without the architecture, that files have beside the common ones.
    names : mapping
        Tensors by parameters where they are called otherwise.
    change : callable or None
        Returns the tensors that a parameter becomes, by its name without "model.layers.3.";
        `None` for those that are only renamed.
    config_suffix : str
        What the name of the configuration ends with.
    name : str
        Another name than the architecture's.
    in_llama_cpp : bool
        Whether llama.cpp computes it as transformers does.
    shift : bool
        Whether 1 is added to norms.
    published : mapping
        What a published config.json says, and transformers does not write.
    further : callable or None
        Returns tensors that are no parameters, by the configuration.
    as_llama_cpp : callable or None
        Has a model compute something as llama.cpp does, and returns what that is.
    published_names : str
        The model type whose names of weights published checkpoints have, if transformers writes
        its own for a model of texts alone.
    renamed : mapping
        Parts of names of weights that transformers writes, and what published checkpoints have.
    """

    architecture: str
    prefix: str
    settings: Mapping[str, Any]
    keys: Callable[[Any], dict[str, Any]]
    names: Mapping[str, str] = field(default_factory=dict)
    change: Callable[[str, np.ndarray, Any], Tensors | None] | None = None
    config_suffix: str = "Config"
    name: str = ""
    in_llama_cpp: bool = True
    shift: bool = False
    published: Mapping[str, Any] = field(default_factory=dict)
    further: Callable[[Any], Tensors] | None = None
    as_llama_cpp: Callable[[Any], str] | None = None
    published_names: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)

    def build(self) -> Any:
        """Return the model with random weights, float32; the same each time."""
        import torch
        import transformers

        from tests.helpers.families import _randomize

        config = getattr(transformers, self.prefix + self.config_suffix)(
            **{**tiny.COMMON, **self.settings}
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(sum(self.architecture.encode()))
            model = getattr(transformers, f"{self.prefix}ForCausalLM")(config).eval()
            _randomize(model)
        return model

    def metadata(self, config: Any) -> dict[str, Any]:
        """Return all keys of the file."""
        rope = getattr(config, "rope_parameters", None) or {}
        further = self.keys(config)
        keys = {
            "block_count": config.num_hidden_layers,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "attention.head_count": config.num_attention_heads,
            # A number that layers do not share is not to be asked for.
            "attention.head_count_kv": further.get("attention.head_count_kv")
            or config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", 1e-5),
            "rope.freq_base": rope.get("rope_theta"),
            "expert_used_count": getattr(config, "num_experts_per_tok", None),
            "feed_forward_length": getattr(config, "intermediate_size", None),
            **_scaling(rope),
            **further,
        }
        own = {f"{self.architecture}.{key}": n for key, n in keys.items() if n is not None}
        return {"general.architecture": self.architecture, **own, **_TOKENS}

    def tensors(self, model: Any) -> Tensors:
        """Return all tensors of the file."""
        found: Tensors = self.further(model.config) if self.further else {}
        tied = model.config.tie_word_embeddings
        for name, parameter in model.state_dict().items():
            values = parameter.float().numpy()
            if ".layers." not in name:
                values = self._shifted(name, values)
                stem, _, kind = name.removeprefix("model.").rpartition(".")
                if not (tied and stem == "lm_head"):
                    leaf = f"{stem}.{kind}"
                    whole = self.names.get(leaf)
                    found[whole or f"{_TOP.get(stem) or self.names[stem]}.{kind}"] = values
                continue
            number, leaf = name.partition(".layers.")[2].split(".", 1)
            changed = self.of_layer(leaf, values, model.config)
            found.update({f"blk.{number}.{leaf}": array for leaf, array in changed.items()})
        return found

    def of_layer(self, leaf: str, values: np.ndarray, config: Any) -> Tensors:
        """Return the tensors of a layer's parameter, by names without the layer's."""
        values = self._shifted(leaf, values)
        changed = self.change(leaf, values, config) if self.change else None
        if changed is None:
            changed = _experts(leaf, values)
        if changed is not None:
            return changed
        names = {**_LAYER, **self.names}
        stem, _, kind = leaf.rpartition(".")
        return {names[leaf] if leaf in names else f"{names[stem]}.{kind}": values}

    def _shifted(self, name: str, values: np.ndarray) -> np.ndarray:
        is_moved = self.shift and name.endswith("norm.weight") and "linear_attn." not in name
        return values + np.float32(1) if is_moved else values

    def publish(self, tensors: Tensors) -> Tensors:
        """Return a checkpoint's tensors as published ones have them, of those of transformers."""
        found = {}
        for name, values in tensors.items():
            for part, published in self.renamed.items():
                name = name.replace(part, published)
            found[name] = values
        return found

    def rewrite(self, file: Path) -> str:
        """Have llama.cpp read something else than its converter wrote; return what that is."""
        return ""


_TOKENS = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}


def add_metadata(writer: Any, metadata: Mapping[str, Any]) -> None:
    """Give a writer values by key, but for the architecture, which it has."""
    import gguf

    for key, value in metadata.items():
        if key == "general.architecture" or key.startswith("GGUF."):
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif all(isinstance(one, int) and one >= 0 for one in value) and max(value) >= 2**31:
            kinds = gguf.GGUFValueType
            writer.add_key_value(key, value, kinds.ARRAY, sub_type=kinds.UINT64)
        else:
            writer.add_array(key, value)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Tensors,
    types: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a GGUF file in the types that parts of tensors' names have, else in float32."""
    import gguf

    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    add_metadata(writer, metadata)
    for name, values in tensors.items():
        is_table = values.dtype == np.int32
        values = np.ascontiguousarray(values, None if is_table else np.float32)
        kind = next((one for part, one in types.items() if part in name), "F32")
        number = gguf.GGMLQuantizationType[kind]
        columns, _ = gguf.GGML_QUANT_SIZES[number]
        if is_table or kind == "F32" or values.ndim < 2 or values.shape[-1] % columns:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Return a file's metadata and its tensors' values, float32."""
    import gguf

    reader = gguf.GGUFReader(path)
    metadata = {name: part.contents() for name, part in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        shape = tuple(int(length) for length in reversed(tensor.shape))
        is_table = tensor.tensor_type == gguf.GGMLQuantizationType.I32
        values = tensor.data if is_table else gguf.dequantize(tensor.data, tensor.tensor_type)
        tensors[tensor.name] = values.reshape(shape)
    return metadata, tensors


def build_from(metadata: Mapping[str, Any], tensors: Tensors) -> Any:
    """Return the model of a file, float32, as the package says it is built."""
    import torch
    import transformers

    from moecache.integrations.transformers import gguf

    shapes = {name: values.shape for name, values in tensors.items()}
    config = gguf.find_config(metadata, shapes, tensors.__getitem__)
    with torch.random.fork_rng(devices=[]):
        model = getattr(transformers, config.architectures[0])(config).eval()
    state = model.state_dict()
    with torch.no_grad():
        for name, source in gguf.find_sources(model, config, metadata, shapes).items():
            arrays = [tensors[tensor] for tensor in source.tensors]
            values = source.undo(arrays) if source.undo else np.concatenate(arrays)
            values = values if source.rows is None else values[source.rows]
            assert values.shape == tuple(state[name].shape), name
            state[name].copy_(torch.from_numpy(np.array(values)))
        for block, path in gguf.find_layers(model, shapes).items():
            _fill_experts(model.get_submodule(path), f"blk.{block}.ffn_", tensors)
    return model


def _fill_experts(module: Any, prefix: str, tensors: Tensors) -> None:
    import torch

    from moecache.integrations.transformers import gguf

    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        down = tensors.get(f"{prefix}down_exps.{kind}")
        if down is None:
            continue
        gate_up = tensors.get(f"{prefix}gate_up_exps.{kind}")
        is_gated = getattr(module, "has_gate", True)
        if gate_up is None and not is_gated:
            gate_up = tensors[f"{prefix}up_exps.{kind}"]
        elif gate_up is None:
            parts = [tensors[f"{prefix}{part}_exps.{kind}"] for part in ("gate", "up")]
            if gguf.is_interleaved(module):
                gate_up = np.stack(parts, 2).reshape(
                    parts[0].shape[0], 2 * parts[0].shape[1], *parts[0].shape[2:]
                )
            else:
                gate_up = np.concatenate(parts, 1)
        if kind == "weight" and getattr(module, "is_transposed", hasattr(module, "expert_dim")):
            gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
        first = "gate_up_proj" if is_gated else "up_proj"
        for name, values in ((first, gate_up), ("down_proj", down)):
            getattr(module, name + suffix).copy_(torch.from_numpy(np.array(values)))


def _experts(leaf: str, values: np.ndarray) -> Tensors | None:
    """Return an expert weight as files have it: gate and up apart."""
    stem, _, name = leaf.rpartition(".")
    if not stem.endswith("experts"):
        return None
    if name == "down_proj":
        return {"ffn_down_exps.weight": values}
    gate, up = np.split(values, 2, axis=1)
    return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    if rope.get("rope_type") != "yarn":
        return {}
    keys = {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
        "yarn_attn_factor": "attention_factor",
    }
    found = {f"rope.scaling.{key}": rope.get(name) for key, name in keys.items()}
    return {"rope.scaling.type": "yarn", **found}


def expert_keys(config: Any) -> dict[str, Any]:
    """Return the keys that say how many experts there are, and how wide."""
    width = getattr(config, "moe_intermediate_size", None)
    names = ("num_experts", "num_local_experts")
    count = next(getattr(config, name) for name in names if hasattr(config, name))
    return {"expert_count": count, "expert_feed_forward_length": width}


def head_keys(config: Any) -> dict[str, Any]:
    """Return the same, and the width of heads."""
    lengths = {f"attention.{kind}_length": config.head_dim for kind in ("key", "value")}
    return {**expert_keys(config), **lengths}
