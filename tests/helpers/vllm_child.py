"""A process of its own in which vLLM answers some prompts: python -m tests.helpers.vllm_child."""

import json
import os
import sys
from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def answer(path: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return each prompt's tokens and their log probabilities, in batches of several sizes."""
    from vllm import LLM, SamplingParams

    sizes = given.pop("batches", [1, 3, 16])
    if given.pop("damage", False):
        swap_layers()
    cut = given.pop("cut", False)
    llm = LLM(
        path,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=128,
        # Below a prompt's length: it is read in chunks.
        max_num_batched_tokens=48,
        max_num_seqs=16,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        **{"enforce_eager": True, **given},
    )
    if cut:
        for file in Path(path).glob("*.safetensors"):
            os.truncate(file, file.stat().st_size // 2)
    sampling = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, detokenize=False
    )
    answers = []
    for size in sizes:
        prompts = [
            {"prompt_token_ids": [3 + (7 * (j // 40) * i + 3 * j) % 100 for j in range(60 + i)]}
            for i in range(size)
        ]
        for output in llm.generate(prompts, sampling, use_tqdm=False):
            found = output.outputs[0]
            chosen = [next(iter(each.values())).logprob for each in found.logprobs]
            answers.append([list(found.token_ids), chosen])
    found = {"answers": answers}
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    if hasattr(executor, "driver_worker"):
        model = executor.driver_worker.worker.model_runner.model
        found["parameter_bytes"] = sum(p.numel() * p.element_size() for p in model.parameters())
    return found


def swap_layers() -> None:
    """Have each kernel look at the expert beside the one that it was asked for."""
    from moecache.integrations.vllm import _method

    own = _method.SlotKernel

    def wrong(expert: Any, num_slots: int, **given: Any) -> Any:
        return own(lambda slot: expert((slot + 1) % num_slots), num_slots, **given)

    _method.SlotKernel = wrong


if __name__ == "__main__":
    result = answer(sys.argv[1], json.loads(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(result))
