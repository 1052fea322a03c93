"""What every rank of the tests imports, which takes seconds: once, before ranks are forked."""

import gc
import importlib

from moecache.commands import collector

with collector.waiting():
    for name in (
        "torch.distributed",
        "transformers.models.olmoe.modeling_olmoe",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
    ):
        importlib.import_module(name)
# Ranks go through their own objects only, and share the pages of these.
gc.freeze()
