"""A host inference loop in NumPy alone: how to import moecache into your own.

The model is a decoder of the OLMoE family. Everything but the experts (the
"trunk") is loaded as usual; the routed experts come through a moecache runtime,
which keeps as many as its memory holds and reads the others from the
checkpoint when the router asks for them:

    python examples/numpy_loop.py --prompt "def main():" --memory 25%

The three places where moecache comes in are marked (1), (2) and (3).
"""

import argparse
import codecs
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import moecache

BYTE_OFFSET = 3  # the tiny model's tokens are ByT5's: byte + 3
END_OF_TEXT = 1

# (layer, hidden [T, H], ids [T, k], weights [T, k]) -> [T, H]
RoutedExperts = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class NumpyMoe:
    """The trunk of an OLMoE-like model, in float32, for one sequence.

    Parameters
    ----------
    store : moecache.CheckpointStore
        The checkpoint; the trunk is read from it.
    routed_experts : callable
        Computes a layer's routed experts.
    """

    def __init__(self, store: moecache.CheckpointStore, routed_experts: RoutedExperts) -> None:
        config = store.config
        if config.get("model_type") != "olmoe" or config.get("clip_qkv") is not None:
            raise moecache.ConfigError(
                f"{store.path}: this example runs OLMoE models without clip_qkv, "
                f"not {config.get('model_type')!r}"
            )
        self.weights = {
            name: store.read_tensor(name).astype(np.float32)
            for name in store.tensor_names
            if ".experts." not in name
        }
        self.routed_experts = routed_experts
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config.get("num_key_value_heads") or self.num_heads
        self.head_size: int = config["hidden_size"] // self.num_heads
        self.top_k: int = config["num_experts_per_tok"]
        self.norm_top_k: bool = config.get("norm_topk_prob", False)
        self.epsilon: float = config.get("rms_norm_eps", 1e-5)
        self.max_tokens: int = config["max_position_embeddings"]
        theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
        powers = np.arange(0, self.head_size, 2, dtype=np.float32) / self.head_size
        self.frequencies = (1.0 / theta**powers).astype(np.float32)
        shape = (self.num_layers, self.max_tokens, self.num_kv_heads, self.head_size)
        self.keys = np.zeros(shape, np.float32)
        self.values = np.zeros(shape, np.float32)
        self.num_tokens = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the trunk and of the KV cache."""
        trunk = sum(array.nbytes for array in self.weights.values())
        return trunk + self.keys.nbytes + self.values.nbytes

    def forward(self, tokens: np.ndarray) -> np.ndarray:
        """Append tokens to the sequence and return the last one's logits.

        Parameters
        ----------
        tokens : ndarray of int, shape [T]
            The prompt, or the token just sampled.

        Returns
        -------
        ndarray of float32, shape [vocabulary]
        """
        if len(tokens) == 0 or self.num_tokens + len(tokens) > self.max_tokens:
            raise moecache.ConfigError(
                f"{self.num_tokens} + {len(tokens)} tokens: the model takes 1 to {self.max_tokens}"
            )
        hidden = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}"
            normed = self._norm(hidden, f"{name}.input_layernorm")
            hidden = hidden + self._attention(layer, normed)
            normed = self._norm(hidden, f"{name}.post_attention_layernorm")
            ids, weights = self._route(layer, normed)
            # (1) The routed experts: the only weights that are not in `self.weights`.
            hidden = hidden + self.routed_experts(layer, normed, ids, weights)
        self.num_tokens += len(tokens)
        final = self._norm(hidden[-1:], "model.norm")
        head = "lm_head.weight" if "lm_head.weight" in self.weights else "model.embed_tokens.weight"
        return (final @ self.weights[head].T)[0]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        # RMSNorm, arXiv 1910.07467
        scale = 1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.epsilon))
        return x * scale * self.weights[f"{name}.weight"]

    def _attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        name = f"model.layers.{layer}.self_attn"
        start, stop = self.num_tokens, self.num_tokens + len(x)
        project = {part: x @ self.weights[f"{name}.{part}_proj.weight"].T for part in "qkv"}
        query = self._norm(project["q"], f"{name}.q_norm")
        key = self._norm(project["k"], f"{name}.k_norm")
        query = self._rotate(query.reshape(len(x), self.num_heads, -1), start)
        self.keys[layer, start:stop] = self._rotate(
            key.reshape(len(x), self.num_kv_heads, -1), start
        )
        self.values[layer, start:stop] = project["v"].reshape(len(x), self.num_kv_heads, -1)
        # [heads, tokens, head_size]; grouped-query heads share keys and values
        group = self.num_heads // self.num_kv_heads
        keys = self.keys[layer, :stop].repeat(group, axis=1).transpose(1, 0, 2)
        values = self.values[layer, :stop].repeat(group, axis=1).transpose(1, 0, 2)
        scores = query.transpose(1, 0, 2) @ keys.transpose(0, 2, 1)
        scores *= np.float32(self.head_size**-0.5)
        future = np.arange(stop)[None, :] > np.arange(start, stop)[:, None]
        scores[:, future] = -np.inf
        mixed = softmax(scores) @ values
        return (
            mixed.transpose(1, 0, 2).reshape(len(x), -1) @ self.weights[f"{name}.o_proj.weight"].T
        )

    def _rotate(self, x: np.ndarray, start: int) -> np.ndarray:
        # RoPE, arXiv 2104.09864, in the half-split form of GPT-NeoX
        positions = np.arange(start, start + len(x), dtype=np.float32)
        angles = positions[:, None, None] * self.frequencies
        cosine, sine = np.cos(angles), np.sin(angles)
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate(
            [first * cosine - second * sine, second * cosine + first * sine], axis=-1
        )

    def _route(self, layer: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scores = softmax(x @ self.weights[f"model.layers.{layer}.mlp.gate.weight"].T)
        ids = np.argsort(-scores, axis=-1, kind="stable")[:, : self.top_k]
        weights = np.take_along_axis(scores, ids, axis=-1)
        if self.norm_top_k:
            weights /= weights.sum(-1, keepdims=True)
        return ids, weights


def softmax(x: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis."""
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def generate(
    model: NumpyMoe, prompt: bytes, max_new_tokens: int, temperature: float, seed: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (token, the logits it was drawn from) until the text ends.

    A temperature of 0 takes the likeliest token.
    """
    rng = np.random.default_rng(seed)
    tokens = np.frombuffer(prompt, np.uint8).astype(np.int64) + BYTE_OFFSET
    for _ in range(min(max_new_tokens, model.max_tokens - len(tokens))):
        logits = model.forward(tokens)
        if temperature == 0:
            token = int(logits.argmax())
        else:
            chances = softmax(logits.astype(np.float64) / temperature)
            token = int(rng.choice(len(chances), p=chances))
        yield token, logits
        if token == END_OF_TEXT:
            return
        tokens = np.array([token])


def decode(tokens: Iterator[int]) -> Iterator[str]:
    """Yield text as the bytes of the tokens complete it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        if BYTE_OFFSET <= token < BYTE_OFFSET + 256:
            yield decoder.decode(bytes([token - BYTE_OFFSET]))


def through_moecache(runtime: moecache.ExpertRuntime, compute: str = "numpy") -> RoutedExperts:
    """Return routed experts that come through a runtime, whatever is resident."""

    def routed_experts(
        layer: int, hidden: np.ndarray, ids: np.ndarray, weights: np.ndarray
    ) -> np.ndarray:
        # (2) Each wave names slots that are filled, and the (token, choice) pairs
        # they serve; what is missing is read while the first wave is computed.
        return moecache.experts.feed_forward(runtime, layer, hidden, ids, weights, compute=compute)

    return routed_experts


def main() -> None:
    """Generate text from the command line."""
    parser = argparse.ArgumentParser(description="Generate text with NumPy and moecache.")
    parser.add_argument("--model", default=str(Path(__file__).parent / "tiny_moe"))
    parser.add_argument("--prompt", default="def main():\n    ")
    parser.add_argument("--memory", default="25%", help='for experts: "25%%" or "4GiB"')
    parser.add_argument("--max-new-tokens", type=int, default=200)
    arguments = parser.parse_args()
    # (3) Open the experts. dtype: convert them once, when they are read.
    with (
        moecache.open_store(arguments.model) as store,
        moecache.open(arguments.model, arguments.memory, dtype=np.float32) as runtime,
    ):
        model = NumpyMoe(store, through_moecache(runtime))
        prompt = arguments.prompt.encode()
        pairs = generate(model, prompt, arguments.max_new_tokens, temperature=0.7, seed=0)
        print(arguments.prompt, end="", flush=True)
        for text in decode(token for token, _ in pairs):
            print(text, end="", flush=True)
        print(f"\n\n{runtime.report()}")


if __name__ == "__main__":
    main()
