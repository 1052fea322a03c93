"""Layers of recipes of files: their parts, read from facts and tensors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from moecache.decoding.files._facts import LATENT_EPSILON, Facts
from moecache.decoding.files._stateful import read_stateful
from moecache.decoding.files._tensors import BESIDE_NORMS, correction_of
from moecache.decoding.files.trunk import Trunk
from moecache.decoding.recipe import (
    Attending,
    Attention,
    Beside,
    FeedForward,
    LatentAttention,
    Layer,
    Norm,
    Rotation,
    Router,
)
from moecache.errors import ConfigError
from moecache.kernels import SlotKernel


class LayerReader:
    """Reads the layers of one file.

    Parameters
    ----------
    facts : Facts
    trunk : Trunk
        With the file's tensors beside the experts'.
    pairs : str
        What a rotation turns together, as `Rotation` says it.
    """

    def __init__(self, facts: Facts, trunk: Trunk, pairs: str) -> None:
        self._facts, self._trunk, self._pairs = facts, trunk, pairs

    def norm(self, name: str) -> Norm:
        """Return a norm by its tensor's name without ".weight"."""
        return self._trunk.norm(f"{name}.weight", self._facts.epsilon)

    def layer(self, block: int, kernel_of: Callable[[int], tuple[int, SlotKernel]]) -> Layer:
        """Return a layer.

        Parameters
        ----------
        block : int
        kernel_of : callable (block)
            Returns a block's layer in the runtime, and what computes its experts.
        """
        at, facts, trunk = f"blk.{block}", self._facts, self._trunk
        router, experts, number, forward, latents = None, None, -1, None, None
        has_attention, has_forward = True, facts.has_forward(block)
        before = behind = self.norm(f"{at}.attn_norm") if facts.has_norms_before else None
        if facts.family.is_single:
            has_attention = not has_forward
        elif facts.has_norms_before:
            behind = self.norm(f"{at}.{facts.known.forward_norm}")
        if has_forward and facts.is_dense(block):
            forward = self._feed_forward(at, "")
        elif has_forward:
            number, kernel = kernel_of(block)
            experts, router = kernel.experts, self._router(at)
            if facts.latent_size:
                down, up = (trunk.linear(f"{at}.ffn_latent_{one}") for one in ("down", "up"))
                latents = down, up
            if facts.family.is_beside:
                forward = self._feed_forward(at, "")
            elif facts.shared_width:
                forward = self._feed_forward(at, "_shexp")
        return Layer(
            before if has_attention else None,
            self._attending(block) if has_attention else None,
            behind if has_forward else None,
            forward,
            router,
            experts,
            number,
            latents,
            float(facts.settings.get("residual_multiplier", 1.0)),
            **self._norms(block),
        )

    def _norms(self, block: int) -> dict[str, Any]:
        """Return the norms of what a layer's parts give, and what comes with them."""
        facts, at = self._facts, f"blk.{block}"
        if facts.family.is_beside:
            return self._beside(at)
        found: dict[str, Any] = {}
        if facts.known.part_norms is not None:
            norms = (self.norm(f"{at}.{name}") for name in facts.known.part_norms)
            found = dict(zip(("attention_out", "forward_out"), norms, strict=True))
        if facts.known.sum_norm is not None and not facts.is_dense(block):
            found["forward_out"] = self.norm(f"{at}.{facts.known.sum_norm}")
        if not found or facts.is_dense(block) or not facts.shared_width:
            return found
        # Both are given the same, and neither's result has a norm before their sum has one.
        given = self.norm(f"{at}.{facts.known.forward_norm}")
        return {**found, "beside": Beside(given, given)}

    def _beside(self, at: str) -> dict[str, Any]:
        """Return what a layer has that has a feed-forward beside its experts."""
        trunk = self._trunk
        norms = [self.norm(f"{at}.{name}") for name in BESIDE_NORMS]
        attention_out, forward_out, experts, experts_out, both_out = norms
        scale = np.float32(self._facts.hidden_size**-0.5)
        router = replace(experts, weight=trunk.numbers(f"{at}.ffn_gate_inp.scale") * scale)
        return {
            "attention_out": attention_out,
            "forward_out": both_out,
            "beside": Beside(router, experts, forward_out, experts_out),
            "factor": float(trunk.numbers(f"{at}.layer_output_scale.weight")[0]),
        }

    def _router(self, at: str) -> Router:
        facts, family, trunk = self._facts, self._facts.family, self._trunk
        name, weight = correction_of(trunk, at), f"{at}.ffn_gate_inp.weight"
        correction = None if name is None else trunk.numbers(name)
        for tensor in filter(None, (name, weight)):
            # An expert whose score is none would be chosen always by torch, and never here.
            values = trunk.numbers(tensor)
            if values.dtype == np.float32 and np.isnan(values.sum()):
                raise ConfigError(
                    f"{tensor} has values that are no numbers; download the file again"
                )
        num_groups, num_kept = facts.groups
        return Router(
            trunk.linear(f"{at}.ffn_gate_inp"),
            facts.top_k,
            family.scores,
            correction,
            num_groups,
            num_kept,
            family.num_best,
            is_normalized=facts.is_normalized,
            least=family.least,
            floor=facts.floor,
            scale=facts.experts_scale,
            expert_scales=trunk.numbers(f"{at}.ffn_down_exps.scale") if family.is_beside else None,
            jitter=facts.jitter,
            scales_input=family.scales_input,
            cap=float(facts.settings.get("moe_router_logit_softcapping", 0.0)),
        )

    def _feed_forward(self, at: str, suffix: str) -> FeedForward:
        """Return the feed-forward of all tokens, or of a layer without experts."""
        known, trunk = self._facts.known, self._trunk
        gate, up, down = (f"{at}.ffn_{part}{suffix}" for part in ("gate", "up", "down"))
        has_weight = suffix and self._facts.family.shared_weight is not None
        return FeedForward(
            trunk.linear(gate) if known.has_gates else None,
            trunk.linear(up),
            trunk.linear(down),
            known.gate.get("activation", "silu"),
            trunk.linear(f"{at}.ffn_gate_inp{suffix}") if has_weight else None,
        )

    def _attending(self, block: int) -> Attending:
        if self._facts.is_linear(block):
            return read_stateful(self._facts, self._trunk, f"blk.{block}")
        if self._facts.rank is not None:
            return self._latents(block)
        return self._attention(block)

    def _attention(self, block: int) -> Attention:
        at, facts, trunk = f"blk.{block}", self._facts, self._trunk
        family, heads = facts.family, facts.heads(block)
        norms, sinks = [f"{at}.attn_{part}_norm" for part in "qk"], f"{at}.attn_sinks.weight"
        query, key = (self.norm(name) if f"{name}.weight" in trunk else None for name in norms)
        if facts.has_head_norms and facts.known.head_norms == "plain" and facts.turned(block):
            query = key = self._plain_norm(heads.width)
        return Attention(
            trunk.linear(f"{at}.attn_q"),
            trunk.linear(f"{at}.attn_k"),
            trunk.linear(f"{at}.attn_v") if facts.has_values(block) else None,
            trunk.linear(f"{at}.attn_output"),
            num_heads=facts.heads_of_layers[block],
            num_kv_heads=heads.num_kv_heads,
            width=heads.width,
            value_width=heads.value_width,
            scale=facts.scale(block),
            rotation=Rotation(facts.turned(block), self._pairs, heads.first_angle),
            query_norm=query,
            key_norm=key,
            value_norm=self._plain_norm(heads.value_width) if family.is_beside else None,
            has_late_norms=family.has_late_norms,
            clip=None if family.clip is None else facts.settings.get(family.clip),
            sinks=trunk.numbers(sinks) if sinks in trunk else None,
            window=facts.window(block),
            is_chunked=facts.is_chunked(block),
            temperature=facts.temperature(block),
            is_gated=family.is_gated,
            gates=trunk.linear(f"{at}.attn_gate") if family.gates else None,
            gate_function=family.gate_function,
            value_scale=float(facts.settings.get("attention_value_scale", 1.0)),
        )

    def _plain_norm(self, width: int) -> Norm:
        return Norm(np.ones(width, np.float32), self._facts.epsilon)

    def _latents(self, block: int) -> LatentAttention:
        at, facts, trunk = f"blk.{block}", self._facts, self._trunk
        heads, (_, _, more) = facts.heads(block), facts.held(block)
        has_low = facts.low_rank is not None
        return LatentAttention(
            trunk.linear(f"{at}.attn_q_b" if has_low else f"{at}.attn_q"),
            trunk.linear(f"{at}.attn_kv_a_mqa"),
            trunk.norm(f"{at}.attn_kv_a_norm.weight", LATENT_EPSILON),
            trunk.expansion(at, facts.num_heads),
            trunk.linear(f"{at}.attn_output"),
            num_heads=facts.num_heads,
            width=heads.width - more,
            value_width=heads.value_width,
            scale=facts.scale(block),
            rotation=Rotation(heads.turned, self._pairs),
            low=trunk.linear(f"{at}.attn_q_a") if has_low else None,
            low_norm=trunk.norm(f"{at}.attn_q_a_norm.weight", LATENT_EPSILON) if has_low else None,
            temperature=facts.temperature(block),
            still_width=more - heads.turned,
            gates=trunk.linear(f"{at}.attn_gate") if facts.family.gates else None,
        )
