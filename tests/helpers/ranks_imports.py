"""What every rank of the tests imports, which takes seconds: once, before ranks are forked."""

import importlib

for name in (
    "torch.distributed",
    "transformers.models.olmoe.modeling_olmoe",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
):
    importlib.import_module(name)
