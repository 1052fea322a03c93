"""Describing: what a checkpoint says of its model, as far as a recipe takes it."""

from dataclasses import replace
from operator import methodcaller

from moecache.decoding.files.described import Described
from moecache.decoding.files.known import CORRECTION, NoTextModelError, family_of
from moecache.decoding.gguf._known import KNOWN
from moecache.decoding.safetensors._config import Config
from moecache.decoding.safetensors._renamed import RenamedStore
from moecache.decoding.safetensors._rows import ROWS, settings_of
from moecache.decoding.safetensors.generation import read_generation
from moecache.layout import Role
from moecache.stores.safetensors import SafetensorsStore

_is_correction = methodcaller("endswith", CORRECTION)
# What its classes are for: a text that goes on.
_ENDINGS = ("ForCausalLM", "ForConditionalGeneration")


def describe_checkpoint(store: SafetensorsStore) -> Described:
    """Return what a checkpoint says.

    Raises
    ------
    NoTextModelError
        If its model runs with torch alone.
    FormatError
        If generation_config.json is not JSON.
    StoreError
        If it cannot be read.
    """
    trunk = (store.tensor_entry(name) for name in store.trunk_names)
    roles = [role for layer in store.layout.layers for role in layer]
    shapes = (*(entry.shape for entry in trunk), *(role.shape for role in roles))
    counts = (length for shape in shapes for length in shape)
    largest = max((store.layout.num_experts, *counts))
    config = Config(store.config, largest)
    row = ROWS.get(config.kind)
    if row is None:
        raise NoTextModelError(f"model type {config.kind!r} runs with torch")
    classes = store.config.get("architectures")
    if isinstance(classes, list) and not all(str(name).endswith(_ENDINGS) for name in classes):
        raise NoTextModelError(f"{classes} are torch's")
    known = KNOWN[row.known]
    family = family_of(row.prefix)
    assert family is not None
    settings = settings_of(config, row)
    gate = {**known.gate, **(row.gate(config) if row.gate else {})}
    # Heads lie as transformers has them.
    known = replace(known, gate=gate, is_tiled=False, **row.overrides)
    is_tied = config.is_tied
    turned = store.layout.find_transposed() if row.stored != "rows" else frozenset()
    if row.stored == "either" and any(_is_square(role) for role in roles if role.name in turned):
        raise NoTextModelError("experts' matrices are square: torch's to tell their order")
    renamed = RenamedStore(
        store,
        known,
        num_layers=settings["num_hidden_layers"],
        adds_one=family.adds_one,
        has_wide_routers=row.has_wide_routers,
        num_norms=settings.get("n_groups", settings.get("mamba_n_groups", 0)),
        is_beside=family.is_beside,
        is_tied=row.is_tied if is_tied is None else is_tied,
        transposed=turned,
    )
    if settings.get("use_expert_bias") is False and any(map(_is_correction, renamed.tensor_shapes)):
        raise NoTextModelError("there are corrections of scores, and use_expert_bias is false")
    ends, drawn = read_generation(store.directory / "generation_config.json", config)
    own = renamed.own_layers
    # As transformers has them.
    states = "f32" if renamed.is_f32 else "bf16"
    pairs = family.pairs
    return Described(renamed, settings, family, known, pairs, ends, drawn, own, states, turned)


def _is_square(role: Role) -> bool:
    return len(role.shape) == 2 and role.shape[0] == role.shape[1]
