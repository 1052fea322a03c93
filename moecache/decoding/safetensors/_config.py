"""A checkpoint's config.json, read key by key as transformers' configurations have it."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from moecache.decoding.files.known import NoTextModelError

_MISSING: Any = object()
# Of rotations: what transformers has where a configuration says nothing.
_BETA_FAST, _BETA_SLOW = 32.0, 1.0
# Longer ones are no model's, and their logarithms no numbers.
_LONGEST = 2.0**40
# Texts that are no longer than those of training, and longer ones.
_PARTS = ("short", "long")
# What is no part of a rotation itself.
_SCALED = ("llama_4_scaling_beta", "max_position_embeddings")
# What a rotation of a text takes no notice of: parts of positions in images.
_UNUSED = frozenset(("mrope_section", "mrope_interleaved", "type"))


class Config:
    """The part of a config.json that is about text.

    Parameters
    ----------
    values : mapping
        All of it.
    largest : int
        The largest dimension of the checkpoint's tensors: no size of a model is above it.

    Attributes
    ----------
    kind : str
        Its `model_type`, of the text's part if there are several.
    largest : int

    Notes
    -----
    Methods raise a `NoTextModelError` for what they cannot use: transformers may.
    """

    def __init__(self, values: Mapping[str, Any], largest: int) -> None:
        inner = values.get("text_config")
        self._outer = values
        self._values: Mapping[str, Any] = inner if isinstance(inner, dict) else values
        self.largest = largest
        self.kind = str(self._values.get("model_type", ""))
        self._names: Mapping[str, str] = {}

    def renamed(self, names: Mapping[str, str]) -> "Config":
        """Return the same, in which keys may go by other names, given by the usual ones."""
        found = Config(self._outer, self.largest)
        found._names = names
        for usual, own in names.items():
            if (
                own in self._values
                and self._values.get(usual, self._values[own]) != self._values[own]
            ):
                raise self.unsupported(usual)
        return found

    def whole(self, name: str) -> Any:
        """Return a value of the model, which its part for text may say instead."""
        found = self._outer.get(name)
        return self._values.get(name) if found is None else found

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value as it is; one that is null is the default."""
        found = self._values.get(self._own(name))
        return default if found is None else found

    def size(self, name: str, default: Any = _MISSING, *, least: int = 0) -> Any:
        """Return a number of rows, columns, heads or layers."""
        found = self._found(name, default)
        return found if found is default else self._sized(name, found, least)

    @property
    def num_layers(self) -> int:
        """Number of the model's layers, which a list of their kinds may say alone."""
        kinds = self.get("layers_block_type")
        usual = len(kinds) if isinstance(kinds, list) else _MISSING
        return int(self.size("num_hidden_layers", usual, least=1))

    def count(self, *names: str) -> int:
        """Return a number, at least 1, which goes by one of some names, or for each layer."""
        known = next((name for name in names if self.get(name) is not None), names[0])
        listed = self.get(known)
        if isinstance(listed, list) and listed and listed.count(listed[0]) == len(listed):
            return int(self._sized(known, listed[0], 1))
        return int(self.size(known, least=1))

    def real(self, name: str, default: Any = _MISSING, *, least: float = 0.0) -> Any:
        """Return a float above `least`."""
        found = self._found(name, default)
        if found is default:
            return found
        return self._real(name, found, least)

    def number(self, name: str, default: Any = _MISSING) -> Any:
        """Return a whole number, at least 1, that is no size of the checkpoint's tensors.

        Or the default.
        """
        found = self._found(name, default)
        if found is default:
            return found
        if not self._real(name, found, 0.0).is_integer():
            raise self.unsupported(name)
        return int(found)

    def flag(self, name: str, default: Any = _MISSING) -> bool:
        """Return True or False."""
        found = self._found(name, default)
        if isinstance(found, bool):
            return found
        raise self.unsupported(name)

    def require(self, name: str, *allowed: Any) -> None:
        """Raise the error of `unsupported` unless a value is one of some, or not there.

        Null is a value.
        """
        if self._values.get(self._own(name), allowed[0]) not in allowed:
            raise self.unsupported(name)

    def demand(self, name: str, *allowed: Any) -> None:
        """Raise the error of `unsupported` unless a value is there, and one of some."""
        if self.get(name) not in allowed:
            raise self.unsupported(name)

    def kinds(
        self, name: str, allowed: Collection[str], usual: Sequence[str] | None = None
    ) -> list[str]:
        """Return the kind of each layer; `usual` where nothing says it, if it is given."""
        found = self.get(name, usual)
        is_list = isinstance(found, list) and len(found) == self.num_layers
        if is_list and set(map(str, found)) <= {*allowed}:
            return list(found)
        raise self.unsupported(name)

    def bases(self, name: str, usual: Sequence[float]) -> list[float | None]:
        """Return the base of each layer's rotation; `None` for 0, of those that turn nothing."""
        found = self.get(name, usual)
        if not isinstance(found, list) or len(found) != self.num_layers:
            raise self.unsupported(name)
        is_zero = [type(base) in (int, float) and base == 0 for base in found]
        return [
            None if zero else self._real(name, base, 1.0)
            for base, zero in zip(found, is_zero, strict=True)
        ]

    @property
    def is_tied(self) -> bool | None:
        """Whether the head is the embedding; `None` if that is not said.

        Of a model of several parts the whole says it.
        """
        said = self.whole("tie_word_embeddings")
        said = self.whole("tie_embedding") if said is None else said
        return said if isinstance(said, bool) else None

    def rope_of(self, kind: str, *known: str, share: float = 1.0) -> dict[str, Any]:
        """Return those of the `rope_parameters` that are for one kind of layers.

        Parameters
        ----------
        kind : str
        known : str
            Types that such a rotation may have beside "default".
        share : float, default 1
            Of a head, that is turned where nothing says it.
        """
        said = self.get("rope_parameters", {})
        own = said.get(kind) if isinstance(said, dict) else None
        if not isinstance(own, dict):
            raise self.unsupported("rope_parameters")
        return self._rope("rope_parameters", own, share, ("default", *known))

    def rope(self, share: float = 1.0, *, is_partial: bool = False) -> dict[str, Any]:
        """Return the `rope_parameters`, as transformers of any release writes them.

        Parameters
        ----------
        share : float, default 1
            Of a head, that is turned where nothing says it.
        is_partial : bool, default False
            Whether a part of a head may be said to be turned though all of it is by default.
        """
        name, said = self._said_rope()
        found = self._rope(name, said, share, ("default", "linear", "yarn", "llama3"))
        # Families that turn whole heads take no notice of it.
        if share == 1 and "partial_rotary_factor" in found and not is_partial:
            raise self.unsupported("partial_rotary_factor")
        return found

    def stretched_rope(self, width: int) -> dict[str, Any]:
        """Return those of Hunyuan's: "dynamic", with an alpha that stretches it once and for all.

        Parameters
        ----------
        width : int
            Numbers of a head, all of which are turned.
        """
        name, said = self._said_rope()
        alpha = said.get("alpha")
        if not alpha or said.get("rope_type", said.get("type")) != "dynamic" or width <= 2:
            return self.rope()
        found = self._rope(name, {**said, "rope_type": "default"}, 1.0, ("default",))
        found["rope_theta"] *= self._real(name, alpha, 0.0) ** (width / (width - 2))
        return found

    def long_rope(self, width: int) -> dict[str, Any]:
        """Return those of PhiMoE's: "longrope", with a scale for short texts, and one for long.

        transformers turns long texts by the factors of short ones.

        Parameters
        ----------
        width : int
            Numbers of a head, all of which are turned.
        """
        name, said = self._said_rope()
        kind = said.get("rope_type", said.get("type", "default"))
        if kind == "default":
            return self.rope()
        if kind != "longrope":
            raise self.unsupported(name)
        found = self._rope(name, {**said, "rope_type": "default"}, 1.0, ("default",))
        scales = [self._real(name, said.get(f"{part}_mscale"), 0.0) for part in _PARTS]
        length = said.get("original_max_position_embeddings")
        length = self.get("original_max_position_embeddings") if length is None else length
        factors = [said.get(f"{part}_factor") for part in _PARTS]
        for each in factors:
            if not isinstance(each, list) or len(each) != width // 2:
                raise self.unsupported(name)
            for factor in each:
                self._real(name, factor, 2.0**-20)
        original = int(self._real(name, length, 1.0))
        # Texts that are longer have another scale.
        if scales[0] != scales[1] and original < self.real("max_position_embeddings"):
            raise self.unsupported(name)
        return {
            **found,
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            "attention_factor": scales[0],
            **{f"{part}_factor": factors[0] for part in _PARTS},
        }

    def scaled_rope(self, share: float) -> dict[str, Any]:
        """Return those of Mistral 4's, which say how queries of far positions are scaled, too.

        Parameters
        ----------
        share : float
            Of a head, that is turned.
        """
        name, said = self._said_rope()
        rest = {key: value for key, value in said.items() if key not in _SCALED}
        if abs(self._real(name, said.get("partial_rotary_factor", share), 0.0) - share) > 1e-6:
            raise self.unsupported(name)
        beta = self._real(name, said.get("llama_4_scaling_beta", 0.0), -1.0)
        found = self._rope(name, {**rest, "partial_rotary_factor": 1.0}, 1.0, ("default", "yarn"))
        length = said.get("original_max_position_embeddings")
        found["llama_4_scaling_beta"] = beta
        if beta:
            found["original_max_position_embeddings"] = int(self._real(name, length, 1.0))
        return found

    def _said_rope(self) -> tuple[str, dict[str, Any]]:
        """Return the name and value of the one key that says how positions are turned."""
        names = [n for n in ("rope_parameters", "rope_scaling") if self.get(n) is not None]
        name = names[0] if names else "rope_scaling"
        said = self.get(name, {})
        if len(names) > 1 or not isinstance(said, dict):
            raise self.unsupported(name)
        return name, said

    def _rope(
        self, name: str, given: Mapping[str, Any], share: float, known: Sequence[str]
    ) -> dict[str, Any]:
        said = dict(given)
        kind = said.pop("rope_type", said.get("type", "default"))
        kind = "default" if kind == "mrope" else kind
        said = {key: value for key, value in said.items() if key not in _UNUSED}
        theta = said.pop("rope_theta", self.get("rope_theta"))
        if theta is None:
            raise self.missing("rope_theta")
        share = said.pop("partial_rotary_factor", self._found("partial_rotary_factor", share))
        found: dict[str, Any] = {
            "rope_type": kind,
            "rope_theta": self._real("rope_theta", theta, 1.0),
        }
        if share != 1:
            found["partial_rotary_factor"] = self._real("partial_rotary_factor", share, 0.0)
            if found["partial_rotary_factor"] > 1:
                raise self.unsupported("partial_rotary_factor")
        if kind not in known:
            raise self.unsupported(name)
        if kind in ("default", "proportional"):
            # A scaling that is none has nothing else to say.
            return found
        factor = self._real(name, said.pop("factor", None), 0.0)
        if factor < 1:
            raise self.unsupported(name)
        found["factor"] = factor
        if kind == "linear" and said.keys() - {"original_max_position_embeddings"}:
            raise self.unsupported(name)
        if kind == "linear":
            return found
        if kind == "llama3":
            return {**found, **self._llama3(name, said)}
        return {**found, **self._yarn(name, said)}

    def has(self, name: str) -> bool:
        """Return whether there is a key, null or not."""
        return self._own(name) in self._values

    def missing(self, name: str) -> NoTextModelError:
        """Return the error that a key is missing of which no default is known here."""
        name = self._own(name)
        return NoTextModelError(f"{name} is not in config.json, and torch's to know")

    def unsupported(self, name: str) -> NoTextModelError:
        """Return the error that torch has to make out a value."""
        name = self._own(name)
        text = repr(self._values.get(name))
        text = text if len(text) <= 80 else f"{text[:77]}..."
        return NoTextModelError(f"{name} is {text} in config.json, which is torch's to make out")

    def _yarn(self, name: str, said: dict[str, Any]) -> dict[str, Any]:
        """Return what a rotation by YaRN has beside its factor."""
        length = said.pop("original_max_position_embeddings", None)
        found: dict[str, Any] = {
            "original_max_position_embeddings": int(self._real(name, length, 0.0)),
            "beta_fast": said.pop("beta_fast", None) or _BETA_FAST,
            "beta_slow": said.pop("beta_slow", None) or _BETA_SLOW,
        }
        if not 1 <= found["original_max_position_embeddings"] < _LONGEST:
            raise self.unsupported(name)
        for key in ("beta_fast", "beta_slow"):
            found[key] = self._real(name, found[key], 2.0**-20)
        if found["beta_fast"] >= 2.0**20 or found["beta_slow"] >= 2.0**20:
            raise self.unsupported(name)
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            value = said.pop(key, None)
            if value is not None:
                found[key] = self._real(name, value, -1.0)
        truncate = said.pop("truncate", True)
        if not isinstance(truncate, bool) or said:
            raise self.unsupported(name)
        return {**found, "truncate": truncate}

    def _llama3(self, name: str, said: dict[str, Any]) -> dict[str, Any]:
        """Return what a rotation by Llama 3's rule has beside its factor."""
        keys = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        found = {key: self._real(name, said.pop(key, None), 2.0**-20) for key in keys}
        if said:
            raise self.unsupported(name)
        return found

    def _found(self, name: str, default: Any) -> Any:
        if default is not None and self._values.get(self._own(name), default) is None:
            raise self.unsupported(name)  # null is not what a missing key is
        found = self.get(name, default)
        if found is _MISSING:
            raise self.missing(name)
        return found

    def _own(self, name: str) -> str:
        """Return what a key is called."""
        own = self._names.get(name, name)
        return name if name in self._values and own not in self._values else own

    def _sized(self, name: str, value: Any, least: int) -> int:
        if type(value) is int and least <= value <= self.largest:
            return value
        raise self.unsupported(name)

    def _real(self, name: str, value: Any, least: float) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and abs(value) < _LONGEST and math.isfinite(value) and value > least:
            return float(value)
        raise self.unsupported(name)
