"""What has `from_pretrained` leave the experts in the file, and quantized weights to moecache."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from moecache.errors import ConfigError
from moecache.integrations.transformers._binding import Binding, bind, check_family
from moecache.integrations.transformers._experts import dispatch, forget_empty, strip
from moecache.integrations.transformers._gguf import share_embedding, strip_gguf
from moecache.integrations.transformers._guards import IMPLEMENTATION, guard, guard_embeddings
from moecache.integrations.transformers._native import NativeEmbedding
from moecache.integrations.transformers._slots import NUMPY_TYPES
from moecache.integrations.transformers._trunk import (
    OTHER_TENSORS,
    TrunkWeight,
    strip_quantized,
)
from moecache.kernels import default_compute
from moecache.stores import CheckpointStore, GgufStore, open_store
from moecache.stores._file import Version
from moecache.stores._versions import unchanged, versions_of

# Whatever an expert's tensor may be called, its scales included.
_EXPERT_TENSORS = (
    r"\.experts\.((\d+\.)?\w+_proj(_(bias|blocks|scales))?|\d+\.w[123])"
    rf"(\.(weight\w*|{OTHER_TENSORS}))?$"
)


@register_quantization_config(IMPLEMENTATION)
class MoeCacheConfig(QuantizationConfigMixin):
    """Tell `from_pretrained(..., quantization_config=)` to leave the experts in the file.

    Give the model that it loads to `attach`; `load` does both.
    """

    def __init__(
        self, trunk: str = "bf16", gguf: str = "", versions: Sequence[Version] = (), **_: Any
    ) -> None:
        self.quant_method: Any = IMPLEMENTATION
        self.trunk = trunk
        # The file that has all weights, if it is of that kind.
        self.gguf = gguf
        # As it was when its configuration was read.
        self.versions = versions


@register_quantizer(IMPLEMENTATION)
class TrunkQuantizer(HfQuantizer):
    """Strips the experts from a model before its weights are read; quantizes nothing."""

    requires_calibration = False
    quantization_config: MoeCacheConfig
    _trunk: Sequence[TrunkWeight] = ()

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        check_family(model)
        known = self.quantization_config
        with (
            unchanged(known.versions) as check,
            open_store(known.gguf or _store_path(checkpoint_files)) as store,
        ):
            check(store)
            if not isinstance(store, GgufStore):
                _check_files(store, checkpoint_files or [])
            bindings = bind(model, store)
            if isinstance(store, GgufStore):
                self._trunk = strip_gguf(model, store)
            else:
                self._trunk = strip_quantized(model, store)
            model.__dict__["_moecache_source"] = (
                store.path,
                versions_of(store),
                [binding.name for binding in bindings],
                _slot_dtype(store, bindings),
                _usual_compute(store, bindings),
            )
        for binding in bindings:
            strip(binding.module, is_initialized=False)
        dispatch([binding.module for binding in bindings], IMPLEMENTATION)
        # They are in the checkpoint, and are meant to stay there.
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            r"^__moecache_padding__\.",  # of packed checkpoints
            _EXPERT_TENSORS,
        }

    def postprocess_model(self, model: Any, **_: Any) -> Any:
        """Make it an ordinary model again, but one that is not saved without its experts."""
        self.remove_quantization_config(model)
        forget_empty(model)
        if self._trunk:
            is_native = self.quantization_config.trunk == "native"
            path, versions, *_ = model.__dict__["_moecache_source"]
            with unchanged(versions) as check, open_store(path) as store:
                check(store)
                for weight in logging.tqdm(self._trunk, desc="Reading the trunk"):
                    weight.read(store, is_native=is_native)
            if self.quantization_config.gguf:
                share_embedding(model, self._trunk)
            if any(isinstance(module, NativeEmbedding) for module in model.modules()):
                guard_embeddings(model)
        guard(model, model.__dict__["_moecache_source"][0])
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Return False: what is saved would have no experts."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False: experts are read only."""
        return False


def _store_path(checkpoint_files: list[str] | None) -> Path:
    if not checkpoint_files:
        raise ConfigError("experts are read from a checkpoint's safetensors files: there are none")
    wrong = [file for file in checkpoint_files if not str(file).endswith(".safetensors")]
    if wrong:
        raise ConfigError(
            f"{wrong[0]}: is no safetensors file; save the model again with save_pretrained"
        )
    return Path(checkpoint_files[0]).parent


def _check_files(store: CheckpointStore, checkpoint_files: list[str]) -> None:
    found = {file.path.name for file in store.files}
    wanted = {Path(file).name for file in checkpoint_files}
    if found != wanted:
        raise ConfigError(
            f"{store.path}: transformers reads {', '.join(sorted(wanted)[:3])}, but experts would "
            f"be read from {', '.join(sorted(found)[:3])}: variants are not supported"
        )


def _usual_compute(store: CheckpointStore, bindings: list[Binding]) -> str:
    """Return what multiplies if nobody says: kernels, if they take all that slots will hold."""
    is_mixed = any(not role.format for roles in store.layout.layers for role in roles)
    if is_mixed and {binding.dtype for binding in bindings} & {torch.float16, torch.float64}:
        return "torch"
    return default_compute(store.layout)


def _slot_dtype(store: CheckpointStore, bindings: list[Binding]) -> np.dtype[Any] | None:
    """Return the type that experts are converted to as they are read; `None` if they are not."""
    dtypes = {binding.dtype for binding in bindings}
    if len(dtypes) != 1 or not dtypes <= NUMPY_TYPES.keys():
        raise ConfigError(f"experts of {', '.join(map(str, dtypes))} are not supported")
    wanted = NUMPY_TYPES[dtypes.pop()]
    roles = [role for binding in bindings for role in store.layout.layers[binding.layer]]
    stored = {role.dtype for role in roles if not role.format}
    # Slots that hold the file's bytes are filled without a copy.
    return None if stored <= {wanted} else wanted
