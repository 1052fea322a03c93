"""A GGUF file's metadata, read key by key and compared with its tensors."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moecache.errors import ConfigError

# Keys that change what a model computes -> values that leave it as it is. An architecture that
# does not ask for one of them cannot represent another value.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_gating_func": (0, 1),  # softmax
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.freq_base_swa": (),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "swiglu_clamp_exp": (0,),
    "swiglu_clamp_shexp": (0,),
    "use_parallel_residual": (False,),
}
_MISSING: Any = object()


class Metadata:
    """The metadata of a GGUF file, with its tensors' names and shapes.

    Parameters
    ----------
    values : mapping
        Values by key, as the file has them: numbers, strings, flags and lists.
    tensors : mapping
        Shape of each tensor, slowest dimension first, by name.
    read : callable, optional
        Returns a tensor's values by its name. Called for small ones alone, and only if an
        architecture has part of its configuration there.

    Raises
    ------
    ConfigError
        If it does not name the architecture, or is not of a model.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        tensors: Mapping[str, tuple[int, ...]],
        read: Callable[[str], np.ndarray] | None = None,
    ) -> None:
        self.values = values
        self.tensors = tensors
        self._read = read
        kind = values.get("general.type", "model")
        if kind != "model":
            raise ConfigError(f"the GGUF file holds no model but {kind!r} (general.type)")
        architecture = values.get("general.architecture")
        if not isinstance(architecture, str):
            raise ConfigError(
                "the GGUF file does not name its architecture: general.architecture is "
                f"{architecture!r}; convert the model again with a current llama.cpp"
            )
        self.architecture = architecture
        # No size of a model is larger than that of some tensor.
        self._largest = max((length for shape in tensors.values() for length in shape), default=0)
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Return whether the file has a key of the architecture's."""
        return self._full(key) in self.values

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """Return the value of a key of the architecture's, of any type."""
        self._asked.add(key)
        value = self.values.get(self._full(key), default)
        if value is _MISSING:
            raise ConfigError(
                f"the GGUF file has no {self._full(key)}; convert the model again with a "
                "current llama.cpp"
            )
        return value

    def require(self, key: str, wanted: float) -> None:
        """Raise the error of `unsupported` unless a number is the one that it is by default."""
        found = self.number(key, wanted)
        if found != wanted:
            raise self.unsupported(key, found)

    def number(self, key: str, default: Any = _MISSING) -> Any:
        """Return a finite number, which may stand in a list of one value for all layers."""
        found = self.get(key, default)
        value = found
        if isinstance(value, Sequence) and not isinstance(value, str) and value:
            value = value[0]
            if any(other != value for other in found):
                raise self.unsupported(key, found)
        if value is default:
            return value
        if _is_number(value) and math.isfinite(value):
            return value if isinstance(value, int) else as_written(value)
        raise ConfigError(f"{self._full(key)} is {_short(found)}, which is no number")

    def real(self, key: str, default: Any = _MISSING, *, least: float = 0.0) -> float:
        """Return a float that is larger than `least`, or the default."""
        value = self.number(key, default)
        if value is default or value > least:
            return float(value)
        raise ConfigError(f"{self._full(key)} is {_short(value)}, and not above {least}")

    def size(self, key: str, default: Any = _MISSING, *, least: int = 0) -> Any:
        """Return a number of rows, columns, heads or layers."""
        value = self.number(key, default)
        if value is default:
            return value
        return self._checked(key, value, least)

    @property
    def num_blocks(self) -> int:
        """Number of the file's blocks; each has a tensor at least."""
        found = self.size("block_count", least=1)
        if found > len(self.tensors):
            raise ConfigError(
                f"{self._full('block_count')} is {found}, but the file has {len(self.tensors)} "
                "tensors; if it is one of several parts, give the first"
            )
        return int(found)

    @property
    def num_layers(self) -> int:
        """Number of the model's layers: blocks, without those that guess further tokens."""
        found = self.num_blocks - self.size("nextn_predict_layers", 0)
        if found < 1:
            raise self.unsupported("nextn_predict_layers", self.get("nextn_predict_layers"))
        return int(found)

    def sizes(self, key: str, default: Any = _MISSING) -> list[int]:
        """Return a size for each of the file's blocks."""
        found = self.get(key, default)
        count = self.num_blocks
        if not isinstance(found, Sequence) or isinstance(found, str):
            return [self._checked(key, found)] * count
        if len(found) != count:
            raise ConfigError(
                f"{self._full(key)} has {len(found)} values, and there are {count} blocks"
            )
        return [self._checked(key, value) for value in found]

    def matrix(self, name: str) -> tuple[int, int]:
        """Return the rows and columns of a tensor that every model has."""
        shape = self.shape(name)
        if len(shape) != 2:
            raise ConfigError(
                f"{name} is of shape {list(shape)}, and no matrix; download the file again"
            )
        return shape[0], shape[1]

    def rows(self, heads: int, width: int) -> int:
        """Return the rows that heads of a width have, which some tensor must have, too."""
        if heads * width > self._largest:
            raise ConfigError(
                f"{heads} heads of {width} values are more than {self._largest}, the largest "
                "dimension of the file's tensors; download the file again"
            )
        return heads * width

    def flag(self, key: str, default: Any = _MISSING) -> Any:
        """Return True or False."""
        value = self.get(key, default)
        if value is default or isinstance(value, bool | int):
            return value if value is default else bool(value)
        raise ConfigError(f"{self._full(key)} is {_short(value)}, which is neither true nor false")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that every model has."""
        if name not in self.tensors:
            raise ConfigError(
                f"the GGUF file has no tensor {name}; if it is one of several parts, give the first"
            )
        return self.tensors[name]

    def vector(self, name: str, length: int) -> np.ndarray:
        """Return the values of a tensor of one dimension: positive, finite float32.

        Raises
        ------
        ConfigError
            If the tensor is of another shape, has other values, or cannot be read.
        """
        if self.shape(name) != (length,):
            raise ConfigError(
                f"{name} is of shape {list(self.shape(name))}, and should have {length} values: "
                "metadata and tensors of the file contradict each other"
            )
        if self._read is None:
            raise ConfigError(f"architecture {self.architecture!r} needs the values of {name}")
        found = np.asarray(self._read(name), np.float32)
        if not (np.isfinite(found) & (found > 0)).all():
            raise ConfigError(f"{name} has values that are not above 0; download the file again")
        return found

    def unsupported(self, key: str, value: Any) -> ConfigError:
        """Return the error that a value cannot be represented."""
        return ConfigError(
            f"{self._full(key)} is {_short(value)}, which transformers cannot represent for "
            f"architecture {self.architecture!r}; run the file with llama.cpp"
        )

    def check_rest(self) -> None:
        """Raise ConfigError if a key that nobody asked for changes what the model computes."""
        for key, neutral in _NEUTRAL.items():
            if key in self._asked or key not in self:
                continue
            value = self.values[self._full(key)]
            values = value if isinstance(value, list | tuple) else (value,)
            if any(one not in neutral for one in values):
                raise self.unsupported(key, value)

    def _checked(self, key: str, value: Any, least: int = 0) -> int:
        if isinstance(value, int) and least <= value <= self._largest:
            return int(value)
        raise ConfigError(
            f"{self._full(key)} is {_short(value)}, and no number from {least} to "
            f"{self._largest}, the largest dimension of the file's tensors; download the file again"
        )

    def _full(self, key: str) -> str:
        return f"{self.architecture}.{key}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_written(value: float) -> float:
    """Return the number of fewest digits that the file's 32 bits stand for: 1e-6 is 1e-6 again."""
    single = np.float32(value)
    return float(str(single)) if float(single) == value else value


def _short(value: Any) -> str:
    text = repr(value[:8] if isinstance(value, list | tuple | str) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
