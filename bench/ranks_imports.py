"""What ranks that are killed again and again import: once, before they are forked."""

import importlib

for name in ("torch.distributed", "transformers.models.qwen3_moe.modeling_qwen3_moe"):
    importlib.import_module(name)
