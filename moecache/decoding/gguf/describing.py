"""Describing: what a GGUF file says of its model, as far as a recipe takes it."""

from moecache.decoding.files.described import Described
from moecache.decoding.files.known import NoTextModelError, family_of
from moecache.decoding.gguf import _softmax
from moecache.decoding.gguf._known import KNOWN
from moecache.decoding.gguf._metadata import Metadata
from moecache.stores import GgufStore

# Where an architecture's rows of heads lie so that pairs that are turned together are neighbours.
_NEIGHBOURS = (_softmax.permuted_heads, _softmax.granite_source)


def describe_gguf(store: GgufStore) -> Described:
    """Return what a GGUF file says.

    Raises
    ------
    NoTextModelError
        If its model runs with torch alone.
    ConfigError
        If the metadata are malformed.
    """
    known = KNOWN.get(store.architecture)
    if known is None:
        raise NoTextModelError(f"architecture {store.architecture!r} runs with torch")
    said = Metadata(store.metadata, store.tensor_shapes, store.read_tensor)
    architecture = known.find(said)
    family = family_of(architecture.prefix)
    if family is None:
        raise NoTextModelError(f"{architecture.prefix} runs with torch")
    settings = architecture.settings(said)
    said.check_rest()
    ends = settings.get("eos_token_id")
    return Described(
        store,
        settings,
        family,
        known,
        "neighbours" if architecture.source in _NEIGHBOURS else family.pairs,
        frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends]),
        # As transformers has it for a model without a generation_config.json.
        {"temperature": 0.0, "top_k": 50},
    )
