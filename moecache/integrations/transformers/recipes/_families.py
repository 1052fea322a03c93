"""The families that have a recipe: a row for each, of the classes that it is made of.

Their attention is grouped-query with q_proj, k_proj, v_proj, o_proj and rotary positions in halves;
their layers are x + attention(norm(x)), then x + mlp(norm(x)). What differs is said here.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """How a family's blocks are to be read.

    Parameters
    ----------
    scores : {"softmax", "sigmoid"}
        What its router makes of logits.
    is_normalized : bool or str
        Whether weights are divided by their sum; or the attribute of the router that says so.
    least : float
        Added to that sum.
    has_groups : bool, default False
        Whether routers have `num_group`, `topk_group` and a correction bias.
    shared : str, optional
        Attribute of a block that has the experts of all tokens.
    shared_weight : str, optional
        Attribute of a block that has their weight.
    clip : str, optional
        Attribute of the configuration that has the bound of queries, keys and values.
    """

    scores: str = "softmax"
    is_normalized: bool | str = "norm_topk_prob"
    least: float = 0.0
    has_groups: bool = False
    shared: str | None = None
    shared_weight: str | None = None
    clip: str | None = None


_SIGMOID = Family(scores="sigmoid", least=1e-20, has_groups=True, shared="shared_experts")

# By the classes of attention and of the block of experts, and the file of `transformers.models`.
FAMILIES = {
    ("qwen3_moe", "Qwen3MoeAttention", "Qwen3MoeSparseMoeBlock"): Family(),
    ("qwen2_moe", "Qwen2MoeAttention", "Qwen2MoeSparseMoeBlock"): Family(
        shared="shared_expert", shared_weight="shared_expert_gate"
    ),
    ("mixtral", "MixtralAttention", "MixtralSparseMoeBlock"): Family(is_normalized=True),
    ("olmoe", "OlmoeAttention", "OlmoeSparseMoeBlock"): Family(clip="clip_qkv"),
    ("glm4_moe", "Glm4MoeAttention", "Glm4MoeMoE"): _SIGMOID,
    ("dots1", "Dots1Attention", "Dots1MoE"): _SIGMOID,
}
