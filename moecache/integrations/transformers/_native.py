"""`trunk="native"`: layers whose weights stay quantized, computed by the kernels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from moecache.errors import MoeCacheError
from moecache.formats import Format
from moecache.integrations.transformers._experts import become, become_again
from moecache.integrations.transformers._fast import TYPES
from moecache.integrations.transformers._operators import is_transformed, operator
from moecache.integrations.transformers._slots import values_of
from moecache.kernels import tile
from moecache.kernels._matrix import Matrix
from moecache.layout import Role

# Attributes of a layer: its matrix, a buffer of bytes, in the compute form or, of embeddings, as in
# the file; format, rows, columns, dtype of the values.
FORM = "_moecache_form"
_KIND = "_moecache_kind"


class NativeValues(torch.Tensor):
    """Values of a weight that stays quantized: writing to them would change no layer."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse to be written to, also by way of views; computed results are plain tensors."""
        # The functions of nn.init name all of their arguments.
        given: Any = next(iter((*args, *(kwargs or {}).values())), None)
        name = func.__name__
        in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
        is_written = in_place or name in _WRITING or func == _SET_DATA
        target = (kwargs or {}).get("out", given if is_written else None)
        if isinstance(target, cls):
            raise _refusal("written to")
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        is_view = isinstance(out, torch.Tensor) and isinstance(given, cls)
        if is_view and out.data_ptr() and _memory_of(out) == _memory_of(given):
            return out.as_subclass(cls)
        return out


# Python's names of methods that write in place; `_HARMLESS` are named alike and write nothing.
_WRITING = {
    *("__setitem__", "__iadd__", "__iand__", "__idiv__", "__ifloordiv__", "__ilshift__"),
    *("__imod__", "__imul__", "__ior__", "__ipow__", "__irshift__", "__isub__", "__ixor__"),
    "__itruediv__",
}
_SET_DATA = vars(torch._C.TensorBase)["data"].__set__
_HARMLESS = {"requires_grad_", "share_memory_"}


def _memory_of(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


def _refusal(what: str) -> MoeCacheError:
    return MoeCacheError(
        f"a weight that stays quantized cannot be {what}: nothing would be computed with it; load "
        'the model with trunk="bf16", or get all weights back with model.moecache.detach()'
    )


class NativeLayer(nn.Module):
    """A layer whose weight stays in a format."""

    @property
    def weight(self) -> torch.Tensor:
        """The values, computed anew each time; they refuse to be written to."""
        values = self.values()
        # Graphs are of torch's own tensors.
        return values if torch.compiler.is_compiling() else values.as_subclass(NativeValues)

    def values(self) -> torch.Tensor:
        """Return the values of the weight."""
        raise NotImplementedError

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Have values in the dtype that the model is given."""
        name, rows, columns, dtype = self.__dict__[_KIND]
        given = fn(torch.empty(0, dtype=dtype)).dtype
        self.__dict__[_KIND] = name, rows, columns, given
        return super()._apply(fn, recurse)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse another weight: nothing would be computed with it."""
        if name == "weight":
            raise _refusal("replaced")
        super().register_parameter(name, param)


class NativeLinear(NativeLayer):
    """A linear layer that has its weight in the compute form of a format."""

    def values(self) -> torch.Tensor:
        """Return the values of the weight."""
        name, rows, columns, dtype = self.__dict__[_KIND]
        out: torch.Tensor = torch.ops.moecache.format_values(
            getattr(self, FORM), name, rows, columns, dtype
        )
        return out

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """Return input @ weight.T + bias, whose bits do not depend on the number of rows."""
        layer: Any = self
        name, rows, columns, dtype = self.__dict__[_KIND]
        if not _is_for_kernels(input, layer.bias, dtype):
            return functional.linear(input, self.values(), layer.bias)
        given = input, getattr(self, FORM), name, rows, columns, layer.bias
        if not torch.compiler.is_compiling():
            return _operator(*given)
        out: torch.Tensor = torch.ops.moecache.format_linear(*given)
        return out


class NativeEmbedding(NativeLayer):
    """An embedding that keeps its rows as in the file, and dequantizes those asked for."""

    def values(self) -> torch.Tensor:
        """Return the values of the weight."""
        layer: Any = self
        return self.forward(torch.arange(layer.num_embeddings))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """Return the rows that ids name."""
        name, _, columns, dtype = self.__dict__[_KIND]
        out: torch.Tensor = torch.ops.moecache.format_rows(
            getattr(self, FORM), input, name, columns, dtype
        )
        return out


def _is_for_kernels(given: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether torch is asked for no gradient and no other type; it does the rest itself."""
    return (
        given.dtype == dtype
        and given.dtype in (*TYPES, torch.float16)
        and given.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and (torch.compiler.is_compiling() or not is_transformed())
        and not (
            torch.is_grad_enabled()
            and (given.requires_grad or (bias is not None and bias.requires_grad))
        )
    )


def can_keep(module: nn.Module, known: Format) -> bool:
    """Return whether a layer can have its weight in a format."""
    if type(module) is nn.Linear:
        return known.form is not None
    # Rows that lie one after the other, with all that they need.
    return type(module) is nn.Embedding and len(known.parts(0, 0)) == 1


def form_of(
    module: nn.Module,
    raw: np.ndarray,
    known: Format,
    shape: tuple[int, int],
    memory: Callable[[int], np.ndarray],
) -> np.ndarray:
    """Return what a layer without a weight keeps of a matrix.

    Parameters
    ----------
    module : Module
    raw : ndarray of uint8
        The matrix as it is in a file.
    known : Format
    shape : (int, int)
    memory : callable (nbytes)
        Returns memory for a form.

    Returns
    -------
    ndarray of uint8
        A linear layer's compute form, in memory that `memory` returned; of others `raw` itself.
    """
    if type(module) is not nn.Linear:
        return raw.reshape(shape[0], -1)
    assert known.form is not None
    form = memory(known.form.nbytes(*shape))
    tile(raw, known.name, *shape, form)
    return form


def keep(
    module: nn.Module, form: np.ndarray, name: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Give a layer without a weight a matrix as it is quantized, by what `form_of` returned."""
    become(module, NativeLinear if type(module) is nn.Linear else NativeEmbedding)
    module.register_buffer(FORM, torch.from_numpy(form), persistent=False)
    module.__dict__[_KIND] = name, *shape, dtype


def thaw(model: nn.Module) -> None:
    """Give layers that stayed quantized their weights as torch's own."""
    for module in [m for m in model.modules() if isinstance(m, NativeLayer)]:
        values = module.values()
        become_again(module)
        del module.__dict__[_KIND]
        delattr(module, FORM)
        module.register_parameter("weight", nn.Parameter(values))


def _on_host(form: torch.Tensor) -> torch.Tensor:
    if form.device.type != "cpu":
        raise MoeCacheError(
            'a trunk that stays quantized is computed on the CPU; load it with trunk="bf16"'
        )
    return form


@operator(
    "format_values(Tensor form, str format, int rows, int columns, ScalarType dtype) -> Tensor",
    lambda form, _, rows, columns, dtype: form.new_empty((rows, columns), dtype=dtype),
)
def _values(
    form: torch.Tensor, name: str, rows: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    # A buffer as `values_in` takes it from a file that has the compute form.
    role = Role("", (rows, columns), format=name, is_tiled=True)
    return values_of(_on_host(form).numpy(), role, dtype)


@operator(
    "format_rows(Tensor raw, Tensor ids, str format, int columns, ScalarType dtype) -> Tensor",
    lambda raw, ids, _, columns, dtype: raw.new_empty((*ids.shape, columns), dtype=dtype),
)
def _rows(
    raw: torch.Tensor, ids: torch.Tensor, name: str, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    some = _on_host(raw).index_select(0, ids.reshape(-1))  # raises for ids that there are not
    role = Role("", (len(some), columns), format=name)
    return values_of(some.numpy(), role, dtype, stored=True).reshape(*ids.shape, columns)


@operator(
    "format_linear(Tensor input, Tensor form, str format, int rows, int columns, Tensor? bias)"
    " -> Tensor",
    lambda input, _, __, rows, *___: input.new_empty((*input.shape[:-1], rows)),  # noqa: A006
)
def _operator(
    input: torch.Tensor,  # noqa: A002 - torch's own name
    form: torch.Tensor,
    name: str,
    rows: int,
    columns: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    if input.shape[-1:] != (columns,):
        raise RuntimeError(
            f"input of shape {list(input.shape)} and a weight [{rows}, {columns}] cannot be "
            "multiplied"
        )
    given = (input if input.dtype in TYPES else input.float()).contiguous()
    kind, size = TYPES[given.dtype], given.element_size()
    out = given.new_empty((*input.shape[:-1], rows))
    terms = None if bias is None else bias.to(given.dtype).contiguous()
    Matrix(_on_host(form).data_ptr(), name, rows, columns).multiply(
        given.data_ptr(),
        kind,
        given.numel() // max(columns, 1),
        columns * size,
        out.data_ptr(),
        kind,
        rows * size,
        *((0, kind) if terms is None else (terms.data_ptr(), kind)),
    )
    return out.to(input.dtype)
