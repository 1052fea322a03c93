"""Train the tiny mixture-of-experts model that this directory ships.

An OLMoE decoder over bytes (ByT5 ids: byte + 3), trained on the sources of the
Python standard library. About half an hour on two cores:

    pip install -e '.[transformers]' -c constraints.txt
    python examples/tiny_moe/train.py --out examples/tiny_moe

Writes config.json and model.safetensors as transformers writes them,
tokenizer_config.json, and training.json: seed, versions, corpus and loss curve.
"""

import argparse
import hashlib
import json
import logging
import math
import platform
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.progress import Progress
from transformers import ByT5Tokenizer, OlmoeConfig, OlmoeForCausalLM

BYTE_OFFSET = 3  # ByT5: ids 0, 1, 2 are pad, end of text and unknown
END_OF_TEXT = 1
EXCLUDED_DIRECTORIES = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}

logger = logging.getLogger("train")


def read_corpus(held_out_every: int = 20) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Return the ids of the training files and of the held-out ones, and where they come from."""
    root = Path(sysconfig.get_paths()["stdlib"])
    training: list[np.ndarray] = []
    held_out: list[np.ndarray] = []
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if EXCLUDED_DIRECTORIES.intersection(path.relative_to(root).parts):
            continue
        text = path.read_bytes()
        digest.update(text)
        ids = np.frombuffer(text, np.uint8).astype(np.int64) + BYTE_OFFSET
        ids = np.append(ids, END_OF_TEXT)
        name = path.relative_to(root).as_posix().encode()
        # By a hash of the name: the same files are held out whatever else is installed.
        is_held_out = hashlib.sha256(name).digest()[0] % held_out_every == 0
        (held_out if is_held_out else training).append(ids)
    source = {
        "text": f"sources of the Python {platform.python_version()} standard library (PSF licence)",
        "sha256": digest.hexdigest(),
        "num_training_files": len(training),
        "num_held_out_files": len(held_out),
        "num_training_bytes": sum(map(len, training)),
        "num_held_out_bytes": sum(map(len, held_out)),
    }
    return np.concatenate(training), np.concatenate(held_out), source


def unigram_entropy(ids: np.ndarray) -> float:
    """Return the entropy of single bytes, in nats: what a model that ignores context can reach."""
    share = np.bincount(ids) / len(ids)
    share = share[share > 0]
    return float(-(share * np.log(share)).sum())


def sample_windows(
    ids: np.ndarray, count: int, length: int, rng: np.random.Generator
) -> torch.Tensor:
    """Return `count` random windows of `length` ids, int64 [count, length]."""
    starts = rng.integers(0, len(ids) - length, count)
    return torch.from_numpy(np.stack([ids[start : start + length] for start in starts]))


def load_balancing_loss(router_logits: tuple[torch.Tensor, ...], top_k: int) -> torch.Tensor:
    """Return the Switch Transformer's balance term (arXiv 2101.03961), taken layer by layer.

    Averaging over all layers at once, as transformers does, lets single layers collapse.
    """
    terms = []
    for logits in router_logits:
        num_experts = logits.shape[-1]
        probabilities = logits.float().softmax(-1)
        chosen = probabilities.topk(top_k, dim=-1).indices.reshape(-1)
        share = torch.bincount(chosen, minlength=num_experts) / chosen.numel()
        terms.append(num_experts * (share * probabilities.mean(0)).sum())
    return torch.stack(terms).mean()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return a linear warm-up over 100 steps, then a cosine down to a twentieth."""
    if step < 100:
        return peak * (step + 1) / 100
    done = (step - 100) / max(1, steps - 100)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def held_out_loss(model: OlmoeForCausalLM, windows: torch.Tensor) -> float:
    """Return the mean cross entropy per byte, in nats."""
    model.eval()
    losses = [float(model(input_ids=batch, labels=batch).loss) for batch in windows.split(8)]
    model.train()
    return sum(losses) / len(losses)


def make_model() -> OlmoeForCausalLM:
    """Return the untrained model: 8 layers, 32 experts, top-4."""
    config = OlmoeConfig(
        vocab_size=384,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT,
        router_aux_loss_coef=0.01,
    )
    model = OlmoeForCausalLM(config)
    # grouped_mm: eager's backward makes a full-size gradient per expert, five times slower.
    model.set_experts_implementation("grouped_mm")
    return model


def train(arguments: argparse.Namespace) -> None:
    """Train, then write the checkpoint and its history."""
    torch.manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)
    training, held_out, source = read_corpus()
    windows = sample_windows(held_out, 48, arguments.length, np.random.default_rng(1))
    entropy = unigram_entropy(held_out)
    logger.info("corpus %s", source)
    logger.info("byte-unigram entropy of the held-out files: %.3f nats", entropy)

    model = make_model()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=arguments.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    curve: list[dict[str, float]] = []
    average = 0.0
    started = time.monotonic()
    model.train()
    with Progress(disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("training", total=arguments.steps)
        for step in range(arguments.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, arguments.steps, arguments.lr)
            batch = sample_windows(training, arguments.batch, arguments.length, rng)
            out = model(input_ids=batch, output_router_logits=True)
            logits = out.logits[:, :-1].reshape(-1, out.logits.shape[-1])
            loss = torch.nn.functional.cross_entropy(logits, batch[:, 1:].reshape(-1))
            balance = load_balancing_loss(out.router_logits, model.config.num_experts_per_tok)
            (loss + model.config.router_aux_loss_coef * balance).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            value = loss.item()
            average = value if step == 0 else 0.95 * average + 0.05 * value
            progress.advance(task)
            if step % 100 == 0 or step == arguments.steps - 1:
                entry = {
                    "step": step,
                    "train_loss": round(average, 4),
                    "held_out_loss": round(held_out_loss(model, windows), 4),
                    "balance": round(balance.item(), 4),
                    "seconds": round(time.monotonic() - started, 1),
                }
                curve.append(entry)
                logger.info("%s", entry)
            if step % 500 == 499:
                save(model, arguments, source, entropy, curve)
    save(model, arguments, source, entropy, curve)
    logger.info("held-out loss of the bf16 weights: %.4f", held_out_loss(model.bfloat16(), windows))


def save(
    model: OlmoeForCausalLM,
    arguments: argparse.Namespace,
    source: dict[str, Any],
    entropy: float,
    curve: list[dict[str, float]],
) -> None:
    """Write the checkpoint in bf16 with everything that is needed to make it again."""
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    copy = OlmoeForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.bfloat16().save_pretrained(out)
    ByT5Tokenizer().save_pretrained(out)
    history = {
        "seed": arguments.seed,
        "steps": arguments.steps,
        "batch": arguments.batch,
        "length": arguments.length,
        "peak_learning_rate": arguments.lr,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "corpus": source,
        "byte_unigram_entropy_nats": round(entropy, 4),
        "loss_curve": curve,
    }
    (out / "training.json").write_text(json.dumps(history, indent=1) + "\n")


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description="Train the tiny mixture-of-experts model.")
    parser.add_argument("--out", default=str(Path(__file__).parent), help="directory to write")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=8, help="windows per step")
    parser.add_argument("--length", type=int, default=512, help="bytes per window")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(arguments)


if __name__ == "__main__":
    main()
