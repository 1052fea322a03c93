"""Tensors, by GGUF's names: those that a model has, and whether its files have just these."""

import re

from moecache.decoding._bound import MOST_RANK
from moecache.decoding.files._facts import Facts, Shapes, Wanted
from moecache.decoding.files._stateful import stateful_tensors
from moecache.decoding.files.described import TensorStore
from moecache.decoding.files.known import CORRECTION, NoTextModelError
from moecache.decoding.files.trunk import EMBEDDING, HEAD, Trunk, is_made_numbers
from moecache.errors import ConfigError
from moecache.formats import StackedFormat
from moecache.kernels import tiler
from moecache.kernels._matrix import Matrix
from moecache.kernels._tiler import Tiler

_EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")
_BLOCK = re.compile(r"blk\.(\d+)\.")

# Of what attention adds; of a feed-forward, of experts, of what both give, and of their sum.
BESIDE_NORMS = (
    *("post_attention_norm", "post_ffw_norm_1", "pre_ffw_norm_2"),
    *("post_ffw_norm_2", "post_ffw_norm"),
)
# By how much longer waves of a rotation are; settings say it, too.
FACTORS = "rope_freqs.weight"
LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


def trunk_names(shapes: Shapes, num_layers: int) -> list[str]:
    """Return the tensors that the model runs but its experts', in the order of the file."""
    return [
        name for name in shapes if not _EXPERTS.fullmatch(name) and not _is_behind(name, num_layers)
    ]


def correction_of(known: Trunk | Shapes, at: str) -> str | None:
    """Return which of some tensors corrects a router's scores, if a block has one."""
    names = (f"{at}.{CORRECTION}", f"{at}.{CORRECTION.removesuffix('.bias')}")
    return next((name for name in names if name in known), None)


def check_tensors(store: TensorStore, facts: Facts) -> None:
    """Look whether a file's tensors are those of its model, in types that kernels multiply.

    Raises
    ------
    NoTextModelError
        If not, with the reason.
    """
    found = store.tensor_shapes
    wanted = dict(_wanted(facts, found))
    for name, shape in wanted.items():
        if name not in found:
            raise NoTextModelError(f"the file has no tensor {name}")
        # A matrix of one row may have lost it.
        if tuple(found[name]) != shape and (1, *found[name]) != shape:
            raise NoTextModelError(f"{name} is {list(found[name])}, and not {list(shape)}")
    routers = {name.rpartition(".ffn_")[0] for name in wanted if "ffn_gate_inp.w" in name}
    layers = {at for at in store.layout.layer_names if not _is_behind(f"{at}.", facts.num_layers)}
    differing = routers ^ layers
    if differing:
        raise NoTextModelError(f"{min(differing)} has a router or experts, and not both")
    others = [name for name in trunk_names(found, facts.num_layers) if name not in wanted]
    if others:
        raise NoTextModelError(f"tensor {others[0]} is none of this model's")
    _check_behind(store, facts)
    _check_experts(store, facts)
    for name, (matrix, _) in store.trunk_matrices.items():
        if name not in wanted or is_made_numbers(name):
            continue
        known = matrix.format
        is_computed = known.form is not None and not isinstance(known, StackedFormat)
        if matrix.is_tiled or not is_computed or not _has_kernel(known.name, matrix.columns):
            raise NoTextModelError(f"{name} in {known.name} runs with torch")
        if name == EMBEDDING and not isinstance(tiler(known.name, 1, matrix.columns), Tiler):
            raise NoTextModelError(f"rows in {known.name} are torch's to read")


def _is_behind(name: str, num_layers: int) -> bool:
    """Return whether a tensor is of a block that guesses further tokens, and is not run."""
    block = _BLOCK.match(name)
    return block is not None and int(block.group(1)) >= num_layers


def _check_behind(store: TensorStore, facts: Facts) -> None:
    behind = {name for name in store.tensor_shapes if _is_behind(name, facts.num_layers)}
    blocks = {name.split(".")[1] for name in behind}
    for block in sorted(blocks):
        if not any(name.startswith(f"blk.{block}.nextn.") for name in behind):
            raise NoTextModelError(f"block {block} is none of the model's, and guesses nothing")


def _check_experts(store: TensorStore, facts: Facts) -> None:
    wide = "gate_up" if facts.known.has_gates else "up"
    wanted: dict[str, str | None] = {wide: None, "down": None}
    if facts.known.has_expert_biases:
        wanted |= {"gate_up_bias": "gate_up", "down_bias": "down"}
    layout = store.layout
    for at, layer in zip(layout.layer_names, layout.layers, strict=True):
        roles = {role.name: role for role in layer}
        if _is_behind(f"{at}.", facts.num_layers):
            continue
        if roles.keys() != wanted.keys():
            raise NoTextModelError(f"{at}'s experts have {', '.join(roles)}")
        for name, role in roles.items():
            if not role.format and role.dtype.name not in ("float32", "bfloat16"):
                raise NoTextModelError(f"{at}'s {name} in {role.dtype.name} runs with torch")
            of = wanted[name]
            if of is not None and role.shape != roles[of].shape[:1]:
                raise NoTextModelError(f"{at}'s {name} is {list(role.shape)}")
        width, hidden = facts.expert_width, facts.expert_size
        rows = width * (1 + facts.known.has_gates)
        for name, shape in {wide: (rows, hidden), "down": (hidden, width)}.items():
            if roles[name].shape != shape:
                raise NoTextModelError(f"{at}'s {name} is {list(roles[name].shape)}")


def _wanted(facts: Facts, found: Shapes) -> Wanted:
    """Yield the trunk's tensors and their shapes; a head as the file has it."""
    hidden = facts.hidden_size
    yield EMBEDDING, (facts.vocabulary, hidden)
    yield from _norm(facts, facts.known.out_norm)
    if HEAD in found:
        has_bias = bool(facts.settings.get("lm_head_bias"))
        name = HEAD.removesuffix(".weight")
        yield from _linear(name, facts.vocabulary, hidden, has_bias=has_bias)
    if facts.may_have_factors and FACTORS in found:
        yield FACTORS, (facts.all_heads()[0].turned // 2,)  # of layers that see all positions
    if facts.has_long_factors:
        for name in LONG_FACTORS:
            if name in found:
                yield name, (facts.all_heads()[0].turned // 2,)
    for block in range(facts.num_layers):
        at = f"blk.{block}"
        if facts.has_norms_before:
            yield from _norm(facts, f"{at}.attn_norm")
        if facts.has_norms_before and not facts.family.is_single:
            yield from _norm(facts, f"{at}.{facts.known.forward_norm}")
        for name in facts.known.part_norms or ():
            yield from _norm(facts, f"{at}.{name}")
        sum_norm = facts.known.sum_norm and f"{at}.{facts.known.sum_norm}"
        if sum_norm and (not facts.is_dense(block) or f"{sum_norm}.weight" in found):
            yield from _norm(facts, sum_norm)
        if facts.is_linear(block):
            yield from stateful_tensors(facts, at, found)
        elif facts.has_keys(block):
            latents = facts.rank is not None
            yield from _latents(facts, block, found) if latents else _attention(facts, block)
        if not facts.has_forward(block):
            continue
        if facts.is_dense(block):
            yield from _feed_forward(facts, at, "", facts.dense_width)
        else:
            yield from _experts(facts, at, found)


def _attention(facts: Facts, block: int) -> Wanted:
    at, hidden = f"blk.{block}", facts.hidden_size
    num_kv_heads, width, value_width, *_ = facts.heads(block)
    num_heads = facts.heads_of_layers[block]
    heads, keys, values = num_heads * width, num_kv_heads * width, num_kv_heads * value_width
    may_be_whole = facts.settings.get("add_full_attention_sink_bias", True)
    if facts.family.sinks is not None and (may_be_whole or facts.window(block) is not None):
        yield f"{at}.attn_sinks.weight", (num_heads,)
    queries = heads * (1 + facts.family.is_gated)
    projections = {"attn_q": queries, "attn_k": keys, "attn_v": values}
    if not facts.has_values(block):
        del projections["attn_v"]
    for name, rows in projections.items():
        yield from _linear(f"{at}.{name}", rows, hidden, has_bias=facts.is_biased)
    if facts.family.gates:
        by_heads = facts.settings.get("gating") == "per-head"
        yield f"{at}.attn_gate.weight", (num_heads if by_heads else heads, hidden)
    has_out_bias = facts.is_biased and facts.known.has_out_bias
    out = num_heads * value_width
    yield from _linear(f"{at}.attn_output", hidden, out, has_bias=has_out_bias)
    if facts.has_head_norms and facts.known.head_norms != "plain":
        is_each = facts.known.head_norms == "each"
        yield f"{at}.attn_q_norm.weight", (width if is_each else heads,)
        yield f"{at}.attn_k_norm.weight", (width if is_each else keys,)
    if facts.family.is_beside:
        for name in BESIDE_NORMS:
            yield f"{at}.{name}.weight", (hidden,)
        yield f"{at}.layer_output_scale.weight", (1,)
        yield from _feed_forward(facts, at, "", facts.dense_width)


def _latents(facts: Facts, block: int, found: Shapes) -> Wanted:
    at, hidden, heads = f"blk.{block}", facts.hidden_size, facts.num_heads
    rank, low, (_, width, value_width, *_) = facts.rank, facts.low_rank, facts.heads(block)
    _, _, more = facts.held(block)
    assert rank is not None
    if not 1 <= rank <= MOST_RANK:
        raise NoTextModelError(f"latents of {rank} numbers run with torch")
    queries, content = heads * width, width - more
    if low is None:
        yield f"{at}.attn_q.weight", (queries, hidden)
    else:
        yield from _linear(f"{at}.attn_q_a", low, hidden, has_bias=facts.is_biased)
        yield f"{at}.attn_q_a_norm.weight", (low,)
        yield f"{at}.attn_q_b.weight", (queries, low)
    name = f"{at}.attn_kv_a_mqa"
    yield from _linear(name, rank + more, hidden, has_bias=facts.is_biased)
    yield f"{at}.attn_kv_a_norm.weight", (rank,)
    if f"{at}.attn_k_b.weight" in found:
        yield f"{at}.attn_k_b.weight", (heads, rank, content)
        yield f"{at}.attn_v_b.weight", (heads, value_width, rank)
    else:
        yield f"{at}.attn_kv_b.weight", (heads * (content + value_width), rank)
    if facts.family.gates:
        yield f"{at}.attn_gate.weight", (heads, hidden)
    values = heads * value_width
    yield from _linear(f"{at}.attn_output", hidden, values, has_bias=facts.is_biased)


def _experts(facts: Facts, at: str, found: Shapes) -> Wanted:
    hidden, count = facts.hidden_size, facts.num_experts
    has_bias = facts.known.has_expert_biases
    yield from _linear(f"{at}.ffn_gate_inp", count, hidden, has_bias=has_bias)
    if facts.family.is_beside:
        yield f"{at}.ffn_gate_inp.scale", (hidden,)
        yield f"{at}.ffn_down_exps.scale", (count,)
    if facts.latent_size:
        yield f"{at}.ffn_latent_down.weight", (facts.expert_size, hidden)
        yield f"{at}.ffn_latent_up.weight", (hidden, facts.expert_size)
    correction = correction_of(found, at)
    if correction is None and facts.needs_correction:
        correction = f"{at}.{CORRECTION}"
    if facts.family.correction is not None and correction is not None:
        yield correction, (count,)
    if facts.shared_width:
        yield from _feed_forward(facts, at, "_shexp", facts.shared_width)
        if facts.family.shared_weight is not None:
            yield f"{at}.ffn_gate_inp_shexp.weight", (1, hidden)


def _feed_forward(facts: Facts, at: str, suffix: str, width: int) -> Wanted:
    hidden = facts.hidden_size
    if facts.known.has_gates:
        yield f"{at}.ffn_gate{suffix}.weight", (width, hidden)
    yield f"{at}.ffn_up{suffix}.weight", (width, hidden)
    yield f"{at}.ffn_down{suffix}.weight", (hidden, width)


def _norm(facts: Facts, name: str) -> Wanted:
    yield f"{name}.weight", (facts.hidden_size,)
    if facts.known.has_layer_norms:
        yield f"{name}.bias", (facts.hidden_size,)


def _linear(name: str, rows: int, columns: int, *, has_bias: bool) -> Wanted:
    yield f"{name}.weight", (rows, columns)
    if has_bias:
        yield f"{name}.bias", (rows,)


def _has_kernel(name: str, columns: int) -> bool:
    try:
        Matrix(64, name, 1, columns)  # an address that nothing is read from
    except ConfigError:
        return False
    return True
