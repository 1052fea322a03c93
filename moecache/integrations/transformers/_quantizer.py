"""The quantizer by which `from_pretrained` leaves experts and quantized weights to moecache."""

from collections.abc import Sequence
from typing import Any

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moecache.integrations.transformers._binding import check_family
from moecache.integrations.transformers._experts import dispatch, forget_empty, strip
from moecache.integrations.transformers._gguf import share_embedding, strip_gguf
from moecache.integrations.transformers._guards import IMPLEMENTATION, guard, guard_embeddings
from moecache.integrations.transformers._native import NativeEmbedding
from moecache.integrations.transformers._source import Source
from moecache.integrations.transformers._targets import check_shapes
from moecache.integrations.transformers._trunk import (
    OTHER_TENSORS,
    TrunkWeight,
    read_trunk,
    strip_quantized,
)
from moecache.runtime import head_start
from moecache.stores import GgufStore
from moecache.stores._index import PROJECTION

# All names that an expert's tensor may have, its scales included.
_EXPERT_TENSORS = (
    rf"\.experts\.(\d+\.)?({PROJECTION})(_(bias|blocks|scales))?(\.(weight\w*|{OTHER_TENSORS}))?$"
)


@register_quantization_config(IMPLEMENTATION)
class MoeCacheConfig(QuantizationConfigMixin):
    """Tell `from_pretrained(..., quantization_config=)` to leave the experts in the file.

    Give the model that it loads to `attach`; `load` does both.
    """

    def __init__(
        self,
        trunk: str = "bf16",
        *,
        source: Source | None = None,
        checks_shapes: bool = True,
        **_: Any,
    ) -> None:
        self.quant_method: Any = IMPLEMENTATION
        self.trunk = trunk
        self.source = source
        self.checks_shapes = checks_shapes

    def to_dict(self) -> dict[str, Any]:
        """Return what of it is text: transformers writes it down."""
        return {"quant_method": self.quant_method, "trunk": self.trunk}


@register_quantizer(IMPLEMENTATION)
class TrunkQuantizer(HfQuantizer):
    """Strips the experts from a model before its weights are read; quantizes nothing."""

    requires_calibration = False
    quantization_config: MoeCacheConfig
    _trunk: Sequence[TrunkWeight] = ()
    _source: Source

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        check_family(model)
        known = self.quantization_config
        # A host that calls `from_pretrained` itself brings no source: this one is closed below.
        self._source = known.source or Source()
        bindings = self._source.bind(model, checkpoint_files)
        store = self._source.store
        if isinstance(store, GgufStore):
            self._trunk = strip_gguf(model, store)
        else:
            # transformers reads most of it, from here on.
            head_start.give_trunk(store)
            if known.checks_shapes:
                check_shapes(model, store)
            self._trunk = strip_quantized(model, store)
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
        store = self._source.store
        if self._trunk:
            is_native = self.quantization_config.trunk == "native"
            head_start.give_trunk(store)
            read_trunk(self._trunk, store, is_native=is_native)
            if isinstance(store, GgufStore):
                share_embedding(model, self._trunk)
            if any(isinstance(module, NativeEmbedding) for module in model.modules()):
                guard_embeddings(model)
        guard(model, store.path)
        if self.quantization_config.source is None:
            self._source.take().close()
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Return False: a saved model would have no experts."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False: experts are read only."""
        return False
