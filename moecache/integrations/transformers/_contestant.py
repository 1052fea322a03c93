"""One contestant of `moecache bench` in a process of its own: a task on standard input.

`python -m moecache.integrations.transformers._contestant PARENT` ends when process PARENT does.
The task is a JSON object, and so is what comes back, as the last line of standard output:
what was measured, or {"error": text, "usage": whether the task was wrong}.
"""

import contextlib
import json
import mmap
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from moecache import kernels
from moecache.decoding import streams
from moecache.errors import ConfigError, FormatError, MoeCacheError, StoreError
from moecache.integrations.hub import look_up
from moecache.integrations.transformers import _baselines, generation, load
from moecache.integrations.transformers._configuration import find_config
from moecache.integrations.transformers._damage import Damage
from moecache.integrations.transformers._gguf import find_model_config
from moecache.integrations.transformers._joining import DEFAULT_TIMEOUT_S, begin, join
from moecache.interrupts import end_with
from moecache.prefault.page_cache import evict
from moecache.sizing.host_memory import peak_rss_bytes
from moecache.stores import GgufStore, is_gguf, open_store
from moecache.stores._paths import check_model
from moecache.telemetry import RuntimeStats

# Prose that comes with every CPython: the measured text, and that of the warm-up.
_TOPICS = ("specialnames", "typesseq")
# Figures that each rank has its own of.
_OF_RANKS = (
    *("slots", "prefill_hit_rate", "prefill_bytes_read", "hit_rate", "bytes_per_token"),
    "stall_ms_per_token",
)
_WARM_UP_TOPICS = ("formatstrings", "classes")
# Of a parent that was killed: weights that were copied to disk are removed meanwhile.
_PATIENCE_S = 10.0


def main() -> int:
    """Run the task on standard input; return 0 if it was done."""
    task = json.load(sys.stdin)
    try:
        with generation.quiet(verbose=task["verbose"]):
            found = _prepared(task) if task["kind"] == "prepare" else _measure(task)
    except (MoeCacheError, OSError, MemoryError, RuntimeError, ValueError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        found = {"error": text, "usage": isinstance(error, ConfigError)}
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    sys.stdout.flush()
    return 1 if "error" in found else 0


def _prepared(task: dict[str, Any]) -> dict[str, Any]:
    """Return what `_prepare` does, once all ranks have it: an error of one is one on all."""
    if task.get("ranks", 1) == 1:
        return _prepare(task)
    with join(True, torch.device("cpu"), DEFAULT_TIMEOUT_S) as ranks:
        found = _prepare(task)
        ranks.compare({"the prompt": str(found["prompt"])})
        return found


def _prepare(task: dict[str, Any]) -> dict[str, Any]:
    """Find the checkpoint's files and the prompts."""
    path = task["model"]
    check_model(path)
    directory = path if Path(path).exists() else _download(path)
    files, config = _look(directory)
    length = task["prompt_tokens"]
    vocabulary = config.get_text_config().vocab_size
    if not 0 < vocabulary < 2**31:
        raise FormatError(f"{path}: vocab_size is {str(vocabulary)[:40]}; is config.json damaged?")
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and length + task["new_tokens"] > context:
        raise ConfigError(
            f"--prompt-tokens {length} and --new-tokens {task['new_tokens']} exceed the "
            f"{context} tokens that the model takes"
        )
    try:
        tokenizer = generation.load_tokenizer(directory)
    except StoreError:
        tokenizer = None
    # Seeds end at 63 bits.
    other = task["seed"] + (1 if task["seed"] < 2**63 - 1 else -1)
    return {
        # Not resolved: the hub's cache has links, whose targets have no ending.
        "directory": str(Path(directory).absolute()),
        "files": [str(file.resolve()) for file in files],
        "text": tokenizer is not None,
        "prompt": _tokens(tokenizer, _TOPICS, length, vocabulary, task["seed"]),
        "warm_up_prompt": _tokens(tokenizer, _WARM_UP_TOPICS, length, vocabulary, other),
    }


def _look(path: str) -> tuple[list[Path], Any]:
    """Return a checkpoint's files, and its configuration."""
    if is_gguf(Path(path)):
        with open_store(path) as store:
            assert isinstance(store, GgufStore)
            return [file.path for file in store.files], find_model_config(store)
    config = find_config(path, {}, {})
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise StoreError(f"{path}: has no safetensors files; save it with save_pretrained")
    return files, config


def _download(name: str) -> str:
    import huggingface_hub

    wanted = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]
    where = look_up(name)
    with Damage(name, "download the model"):
        return huggingface_hub.snapshot_download(name, allow_patterns=wanted, **where)


def _tokens(
    tokenizer: Any, topics: Sequence[str], length: int, vocabulary: int, seed: int
) -> list[int]:
    """Return `count` tokens of prose, or random ones without a tokenizer."""
    if tokenizer is None:
        generator = torch.Generator().manual_seed(seed)
        drawn: list[int] = torch.randint(vocabulary, (length,), generator=generator).tolist()
        return drawn
    from pydoc_data.topics import topics as prose

    text = "\n".join(prose[topic] for topic in topics if topic in prose)
    ids: list[int] = generation.encode(tokenizer, text)[0].tolist()
    return (ids * -(-length // len(ids)))[:length]


def _measure(task: dict[str, Any]) -> dict[str, Any]:
    """Load, warm up, generate; return how long it took and what was generated."""
    imports_bytes = peak_rss_bytes()
    if task["threads"]:
        torch.set_num_threads(task["threads"])
        kernels.use_threads(task["threads"])
    if task["kind"] != "moecache":
        if is_gguf(Path(task["directory"])):
            return {"left_out": "transformers would dequantize the whole file"}
        room = _baselines.lack_of_room(task["checkpoint_bytes"], None)
        if room is not None and task["kind"] != "experts_on_disk":
            return {"left_out": room}
    with tempfile.TemporaryDirectory(prefix="moecache-bench-") as folder:
        if task["kind"] in {"disk_offload", "experts_on_disk"}:
            room = _baselines.lack_of_room(task["checkpoint_bytes"], Path(folder))
            if room is not None:
                return {"left_out": room}
        begun_s = time.perf_counter()
        with _loaded(task, folder) as model:
            load_s = time.perf_counter() - begun_s
            # Every contestant generates all tokens: the work is the same.
            model.generation_config.eos_token_id = None
            if task["warm_up"]:
                _generate(model, task, task["warm_up_prompt"], task["warm_up"])
            left_bytes = _drop_pages(task, folder) if task["cold"] else None
            found = _generate(model, task, task["prompt"], task["new_tokens"])
            return {
                "imports_rss_bytes": imports_bytes,
                "peak_rss_bytes": peak_rss_bytes(),
                "load_s": load_s,
                "threads": torch.get_num_threads(),
                "undropped_bytes": left_bytes,
                **found,
            }


@contextlib.contextmanager
def _loaded(task: dict[str, Any], folder: str) -> Iterator[Any]:
    path, kind = task["directory"], task["kind"]
    options = {} if task["dtype"] is None else {"dtype": task["dtype"]}
    if kind == "moecache":
        chosen = {key: task[key] for key in ("policy", "prefetch", "read", "compute")}
        if task.get("ranks", 1) > 1:
            begin(torch.device("cpu"), DEFAULT_TIMEOUT_S, f"moecache/bench/{task['group']}")
            options["expert_parallel"] = True
        model = load(path, task["memory"], **chosen, **options)
    elif kind == "resident":
        model = _baselines.load_resident(path, **options)
    elif kind == "disk_offload":
        model = _baselines.load_disk_offload(path, folder, **options)
    else:
        model = _baselines.load_experts_on_disk(path, folder, **options)
    with model.moecache if kind == "moecache" else contextlib.nullcontext():
        yield model


def _generate(model: Any, task: dict[str, Any], prompt: list[int], tokens: int) -> dict[str, Any]:
    snapshots: list[RuntimeStats] = []

    def note() -> None:
        if task["kind"] == "moecache":
            snapshots.append(model.moecache.stats())

    times = streams.TokenTimes(on_first=note)
    note()
    generation.continue_tokens(
        model,
        torch.tensor([prompt], dtype=torch.int64),
        times,
        max_new_tokens=tokens,
        temperature=1.0 if task["sample"] else 0.0,
        seed=task["seed"],
    )
    note()
    found: dict[str, Any] = {
        "tokens": times.tokens,
        "prefill_s": times.prefill_s,
        "prefill_tokens_per_s": len(prompt) / times.prefill_s,
        "decode_s": times.decode_s,
        "decode_tokens_per_s": times.tokens_per_s,
    }
    if snapshots:
        before, first, last = snapshots
        prefill, decode, decoded = first - before, last - first, max(1, tokens - 1)
        found.update(
            slots=last.capacity,
            total_experts=last.total_experts,
            slot_bytes=last.pool_bytes,
            prefill_hit_rate=prefill.hit_rate,
            prefill_bytes_read=prefill.bytes_read,
            hit_rate=decode.hit_rate,
            bytes_per_token=decode.bytes_read / decoded,
            stall_ms_per_token=decode.stall_ns / 1e6 / decoded,
            stats=decode.to_dict(),
        )
        ranks = model.moecache.ranks
        if ranks is not None:
            found["ranks"] = ranks.gather({name: found[name] for name in _OF_RANKS})
    return found


def _drop_pages(task: dict[str, Any], folder: str) -> int:
    """Drop what will be read out of the page cache; return the bytes that stay."""
    written = [file for file in Path(folder).rglob("*") if file.is_file()]
    mappings = []
    for path in (*map(Path, task["files"]), *written):
        if path.stat().st_size:
            with path.open("rb") as file:
                mappings.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return evict(mappings)


if __name__ == "__main__":
    end_with(int(sys.argv[1]), patience_s=_PATIENCE_S)
    sys.exit(main())
