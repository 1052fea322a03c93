"""Hy4: hyper-connections, several streams of hidden states, in the place of residual ones."""

from typing import Any

from moecache.integrations.transformers.gguf._architecture import Architecture
from moecache.integrations.transformers.gguf._metadata import Metadata
from moecache.integrations.transformers.gguf._sigmoid import indexed_settings, latent_source

_PARTS = ("fn", "base", "scale")


def _hy_v4(said: Metadata) -> dict[str, Any]:
    settings, layers = indexed_settings(said), range(said.num_layers)
    del settings["first_k_dense_replace"]
    types = said.get("attention.indexer.types", [True] * len(layers))
    if not isinstance(types, list | tuple) or len(types) < len(layers) or not types[0]:
        raise said.unsupported("attention.indexer.types", types)
    return {
        **settings,
        "mlp_layer_types": [
            "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in said.tensors else "dense"
            for layer in layers
        ],
        "indexer_types": ["full" if types[layer] else "shared" for layer in layers],
        "hc_mult": said.size("hyper_connection.count", least=1),
        "hc_eps": said.real("hyper_connection.epsilon", least=-1.0),
        "hc_magnitude": said.real("hyper_connection.magnitude"),
        "swiglu_limit": said.real("swiglu_clamp_exp"),
    }


HY_V4 = Architecture(
    "HYV4",
    _hy_v4,
    {
        "self_attn.gate_proj.weight": "attn_gate.weight",
        "self_attn.sinks": "attn_sinks.weight",
        **{
            f"{kind}_hc.{part}": f"hc_{kind}_{part}.weight"
            for kind in ("attn", "ffn")
            for part in _PARTS
        },
        **{f"model.hc_head.hc_{part}": f"output_hc_{part}.weight" for part in _PARTS},
    },
    latent_source,
    like="glm-dsa",
)
