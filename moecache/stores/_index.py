"""Find the experts among the tensors of a Hugging Face checkpoint.

Two forms are known: one tensor per expert and projection
(`...experts.7.gate_proj.weight`, `...experts.7.w1.weight`), and all experts of
a layer stacked in one tensor (`...experts.gate_up_proj`). A stack that was
split by `moecache pack` has the second form's names with the expert's number
put in (`...experts.7.gate_up_proj_bias`).
"""

import re
from collections.abc import Callable, Collection, Mapping

from moecache.errors import ConfigError, FormatError
from moecache.layout import ExpertLayout
from moecache.stores._header import MAX_LAYERS, TensorEntry, shown
from moecache.stores._matrices import Matrix, Stored
from moecache.stores._parts import PIECE_NAMES, Found, TensorPart, assemble
from moecache.units import whole_number

# Models have less than 100,000. A file with holes may claim any number, and each takes memory.
MAX_EXPERTS = 2**20
# Projection -> (role, its place among the role's pieces). Gate stands before up.
_PIECES = {
    "gate_up_proj": ("gate_up", 0),
    "gate_proj": ("gate_up", 0),
    "w1": ("gate_up", 0),
    "w13": ("gate_up", 0),
    "fc1": ("gate_up", 0),
    "up_proj": ("gate_up", 1),
    "w3": ("gate_up", 1),
    "down_proj": ("down", 0),
    "w2": ("down", 0),
    "fc2": ("down", 0),
}
# GraniteMoe's, whose stacks have no "experts" in their names.
_GRANITE_PIECES = {"input_linear": ("gate_up", 0), "output_linear": ("down", 0)}
# A regular expression of the projections that stand behind "experts".
PROJECTION = "|".join(_PIECES)
_GRANITE_PROJECTION = "|".join(_GRANITE_PIECES)
# Step 3.7's have none either.
_STEP_PIECES = ("gate_proj", "up_proj", "down_proj")
_KIND = r"(?P<kind>(?:[._]\w+)?)"
_PER_EXPERT = re.compile(
    rf"(?P<layer>.+)\.experts\.(?P<expert>\d{{1,7}})\."
    rf"(?P<piece>{PROJECTION}|{_GRANITE_PROJECTION}){_KIND}",
    re.ASCII,
)
_STACKED = re.compile(rf"(?P<layer>.+)\.experts\.(?P<piece>{PROJECTION}){_KIND}", re.ASCII)
_GRANITE = re.compile(
    rf"(?P<layer>.+\.block_sparse_moe)\.(?P<piece>{_GRANITE_PROJECTION})\.(?P<kind>weight)",
    re.ASCII,
)
_STEP = re.compile(
    rf"(?P<layer>.+\.moe)\.(?P<piece>{'|'.join(_STEP_PIECES)})\.(?P<kind>weight)", re.ASCII
)
_STACKS = (_STACKED, _GRANITE, _STEP)


# Returns what the name of an experts' tensor says: layer, piece, expert (None: a stack), kind.
MatchName = Callable[[str], tuple[str, str, str | None, str] | None]
# Returns the matrix that tensors are, by the suffixes of their names; None if not quantized.
FindMatrix = Callable[[Mapping[str, Stored]], Matrix | None]


def index_experts(
    tensors: Mapping[str, tuple[int, TensorEntry]],
    top_k: int,
    chosen: Collection[str] | None = None,
    find_matrix: FindMatrix | None = None,
    match_name: MatchName | None = None,
    num_zero: int = 0,
    group_size: int = 0,
) -> tuple[ExpertLayout, list[list[TensorPart]]]:
    """Return the layout of a checkpoint's experts and, per layer, where they are.

    Parameters
    ----------
    tensors : mapping of tensor name to (file number, entry)
    top_k : int
        Experts per token; 0 if not known.
    chosen : collection of str, optional
        Names of the layers to index; by default all.
    find_matrix : callable, optional
        Says which tensors are a matrix in a format; see `Quantization.match`.
    match_name : callable, optional
        Says which tensors are experts'; by default those with Hugging Face's names.
    num_zero : int, default 0
        Experts that compute nothing, numbered after the others; some matrices may have rows for
        them, which are left out.
    group_size : int, default 0
        Experts of a group, where a layer's are numbered through several groups of other widths.
        Each group after the first is a layer of its own, after all layers of the first.

    Raises
    ------
    FormatError
        If experts are missing, differ within a layer, or layers differ in their
        number; if there are more than 4096 layers, or a million experts; or if the parts of a
        format do not fit.
    ConfigError
        If a chosen layer is not there.
    """
    layers: dict[str, dict[tuple[str, int, str], Found]] = {}
    later: dict[str, int] = {}
    for name, (file, entry) in tensors.items():
        match = (match_name or _match_name)(name)
        if match is None:
            continue
        layer, piece, expert, kind = match
        if group_size and expert is not None and (group := int(expert) // group_size):
            layer, expert = f"{layer} group {group}", str(int(expert) % group_size)
            later[layer] = group
        if chosen is not None and layer not in chosen:
            continue
        role, place = (_PIECES | _GRANITE_PIECES)[piece]
        key = (role, place, _suffix(kind))
        found = layers.setdefault(layer, {})
        if len(layers) > MAX_LAYERS:  # of several files together, or with escapes in their names
            raise FormatError(
                f"there are experts of more than {MAX_LAYERS} layers; no model has so many"
            )
        _add(name, found, key, expert, file, entry)
    for name in chosen or ():
        if name not in layers:
            raise ConfigError(f"there is no layer {shown(name)} with experts")
    names = sorted(layers, key=lambda name: (later.get(name, 0), _natural(name)))
    if find_matrix is not None:
        layers = {name: _matched(layers[name], find_matrix) for name in names}
    _check_projections(names, layers)
    num_experts = _count_experts(names, layers, num_zero)
    total = num_experts * len(names)
    if total > MAX_EXPERTS:
        raise FormatError(f"there are {total} experts, over {MAX_EXPERTS}; no model has so many")
    roles, pieces = [], []
    for name in names:
        layer_roles, layer_pieces = assemble(name, layers[name], num_experts)
        roles.append(layer_roles)
        pieces.append(layer_pieces)
    top_k = whole_number(top_k, "top_k", -(2**31), 2**31)
    if top_k > num_experts > 0:
        raise ConfigError(f"top-{top_k} of layers that have {num_experts} experts is impossible")
    top_k = min(top_k, num_experts)
    return ExpertLayout(num_experts, top_k, roles, names), pieces


def is_expert(name: str) -> bool:
    """Return whether a tensor of this name is an expert's, or belongs to one."""
    return _match_name(name) is not None


def split_name(name: str, expert: int) -> str:
    """Return the name of one expert's part of a stacked tensor, which is read alike.

    Examples
    --------
    >>> split_name("model.layers.3.mlp.experts.gate_up_proj_bias", 7)
    'model.layers.3.mlp.experts.7.gate_up_proj_bias'
    >>> split_name("model.layers.3.block_sparse_moe.input_linear.weight", 7)
    'model.layers.3.block_sparse_moe.experts.7.input_linear.weight'
    """
    match = next(filter(None, (form.fullmatch(name) for form in _STACKS)), None)
    if match is None:
        raise ValueError(f"tensor {shown(name)} is no stack of experts")
    return f"{match['layer']}.experts.{expert}.{name[match.start('piece') :]}"


def _match_name(name: str) -> tuple[str, str, str | None, str] | None:
    forms = (_PER_EXPERT, *_STACKS)
    match = next(filter(None, (form.fullmatch(name) for form in forms)), None)
    if match is None:
        return None
    return match["layer"], match["piece"], match.groupdict().get("expert"), match["kind"]


def _add(
    name: str,
    found: dict[tuple[str, int, str], Found],
    key: tuple[str, int, str],
    expert: str | None,
    file: int,
    entry: TensorEntry,
) -> None:
    if entry.dtype is None:
        raise FormatError(
            f"tensor {shown(name)} has dtype {entry.dtype_name}, which is not supported"
        )
    shape = entry.shape
    if expert is None:
        # Empty experts would cost memory by the number that is claimed.
        if not shape or entry.nbytes == 0:
            raise FormatError(f"tensor {shown(name)} of shape {list(shape)} is no stack of experts")
        shape = shape[1:]
    # A scalar per expert (a scale) becomes one element.
    shape = shape or (1,)
    group = found.setdefault(key, Found(entry.dtype, shape, example=name))
    if (group.dtype, group.shape) != (entry.dtype, shape):
        raise FormatError(
            f"tensor {shown(name)} is {entry.dtype} {list(shape)}, but {shown(group.example)} is "
            f"{group.dtype} {list(group.shape)}"
        )
    index = -1 if expert is None else int(expert)
    if index in group.places or -1 in group.places or (index == -1 and group.places):
        raise FormatError(f"tensors {shown(name)} and {shown(group.example)} are the same experts")
    group.places[index] = (file, entry.offset, name)
    group.num_stacked = 0 if expert is not None else entry.shape[0]


def _matched(
    found: dict[tuple[str, int, str], Found], find_matrix: FindMatrix
) -> dict[tuple[str, int, str], Found]:
    """Return a layer's tensors with those that are one matrix in a format put together."""
    of_matrix: dict[tuple[str, int], dict[str, Found]] = {}
    for (role, place, suffix), group in found.items():
        of_matrix.setdefault((role, place), {})[suffix] = group
    together = {}
    for (role, place), groups in of_matrix.items():
        stored = {
            suffix: Stored(group.example, group.dtype, group.shape)
            for suffix, group in groups.items()
        }
        matrix = find_matrix(stored)
        if matrix is not None:
            codes = groups[matrix.suffixes[0]]
            codes.matrix, codes.parts = matrix, [groups[suffix] for suffix in matrix.suffixes]
            groups = {"": codes} | {key: groups[key] for key in groups.keys() & {"_bias"}}
        together.update({(role, place, suffix): group for suffix, group in groups.items()})
    return together


def _all_parts(found: dict[tuple[str, int, str], Found]) -> list[Found]:
    return [part for group in found.values() for part in group.parts or [group]]


def _check_projections(
    names: list[str], layers: dict[str, dict[tuple[str, int, str], Found]]
) -> None:
    """Raise FormatError unless every layer has the weights that the others have."""
    projections = {name: {key for key in layers[name] if not key[2]} for name in names}
    complete = max(projections.values(), key=len, default=set())
    for name, present in projections.items():
        lacking = [PIECE_NAMES[role, place] for role, place, _ in sorted(complete - present)]
        if lacking:
            raise FormatError(
                f"layer {shown(name)} has no {' and no '.join(lacking)} projection, but other "
                "layers have; download the checkpoint again"
            )


def _count_experts(
    names: list[str], layers: dict[str, dict[tuple[str, int, str], Found]], num_zero: int
) -> int:
    counts: dict[int, str] = {}
    for name in names:
        for group in _all_parts(layers[name]):
            count = group.num_stacked or max(group.places) + 1
            if not group.num_stacked and len(group.places) != count:
                lacking = next(e for e in range(count) if e not in group.places)
                raise FormatError(
                    f"layer {shown(name)} has {len(group.places)} experts up to number "
                    f"{count - 1}, but none with number {lacking} (of tensors such as "
                    f"{shown(group.example)}); download the checkpoint again"
                )
            counts.setdefault(count, group.example)
    if len(counts) > 1 and (len(counts) > 2 or max(counts) - min(counts) != num_zero):
        (few, few_name), (many, many_name) = sorted(counts.items())[:2]
        raise FormatError(
            f"{shown(few_name)} is one of {few} experts, {shown(many_name)} one of {many}: "
            "all layers must have the same number"
        )
    return min(counts, default=0)


def _suffix(kind: str) -> str:
    kind = kind.lstrip("._").removeprefix("weight").lstrip("_")
    return f"_{kind}" if kind else ""


def _natural(name: str) -> list[tuple[int, str]]:
    # Numbers as numbers: layer 10 comes after layer 9. By their length rather
    # than by int(), which refuses the thousands of digits of a hostile name.
    parts = re.split(r"(\d+)", name, flags=re.ASCII)
    return [
        (len(part.lstrip("0")), part.lstrip("0")) if part.isdecimal() else (-1, part)
        for part in parts
    ]
