"""`moecache inspect`: a checkpoint's experts, and what a memory budget buys."""

import argparse
import itertools
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from moecache import kernels
from moecache.commands.arguments import add_option
from moecache.commands.paths import HUB_NAMES, hub_path, printable
from moecache.cuda import check_experts
from moecache.decoding.families import has_kernels, has_recipe
from moecache.errors import ConfigError, MoeCacheError, StoreError
from moecache.layout import ExpertLayout, Role
from moecache.profiles.bandwidth import bandwidth
from moecache.runtime.plan import Plan, plan
from moecache.sizing.host_memory import cgroup_limits, free_host_bytes
from moecache.stores import CheckpointStore, open_store
from moecache.telemetry import ComputeStats
from moecache.units import format_bytes

# Layers whose keys and values stay where they are.
_KEPT = {"full_attention", "sliding_attention"}


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="show a checkpoint's experts and what a memory budget buys",
        description="Show how a checkpoint's experts are laid out, and how many of them a memory "
        "budget holds: what is free, in this machine and in every memory cgroup this process is "
        "in, what the trunk and a KV cache take of it, and how many slots that leaves. Reads "
        "headers only, and of a GGUF that does not fit some experts: it says if they are worth "
        "packing. Exit code 1 if the slots would not fit.",
        epilog="examples: moecache inspect ./Qwen3-30B-A3B --memory 8GiB | "
        "moecache inspect ./Qwen3-30B-A3B --device cuda",
    )
    parser.add_argument(
        "path",
        metavar="MODEL",
        help="checkpoint directory, .safetensors or .gguf file (of a split one any part), or "
        f"{HUB_NAMES}; then all of it is downloaded",
    )
    add_option(parser, "memory", "; without SIZE, the default counts", nargs="?")
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help='where the slots would be: "cpu" (default), or a GPU, "cuda" or "cuda:1"',
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help="length of the KV cache to leave room for (default: the model's, at most 4096)",
    )
    parser.add_argument("--top-k", type=int, help="experts per token, if config.json does not say")
    parser.add_argument(
        "--bandwidth",
        action="store_true",
        help="measure how fast this machine's memory is read (a quarter of a second), and say how "
        "many tokens/s that allows; a profile (MOECACHE_PROFILE) keeps it",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the layout and the plan; return the exit code."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    arguments.path = hub_path(arguments.path)
    with open_store(arguments.path, top_k=arguments.top_k) as store:
        kind = store.config.get("model_type")
        kind = printable(kind[:100]) if isinstance(kind, str) else ""
        console.print(f"{printable(store.path)}  {kind}", style="bold")
        left_out = store.leave_mtp_out()
        layout = store.layout
        quantized, way_of_texts = _quantized(store), _text_way(store)
        if layout.total_experts == 0:
            console.print("no experts: not a mixture-of-experts model, or of an unknown form")
            return 1
    top_k = f"top-{layout.top_k}" if layout.top_k else "top-k unknown"
    console.print(
        f"{layout.num_layers} MoE layers x {layout.num_experts} experts, {top_k}; "
        f"{format_bytes(layout.total_bytes)} in experts"
    )
    for line in (quantized, _mtp(left_out)):
        if line:
            console.print(printable(line))
    console.print(_layer_table(layout))
    planned = plan(
        arguments.path,
        arguments.memory,
        arguments.device,
        top_k=arguments.top_k,
        context_tokens=arguments.context,
        makes_room=True,
        layers=layout.layer_names if left_out else None,
    )
    console.print(_memory_table(planned))
    console.print(_plan_table(planned))
    gpu = planned.gpu
    is_computed = has_kernels(kind, on_gpu=gpu is not None)
    if is_computed:
        console.print(printable(_compute(planned, measures=arguments.bandwidth)))
    else:
        console.print(f"experts of {kind} have no kernels, so that torch multiplies")
    if gpu is not None and is_computed and kind:
        reason = _why_no_graphs(store.config, planned)
        way = f"the model's modules: {reason}" if reason else 'CUDA graphs with compute="fast"'
        console.print(f"tokens of {kind}: {way}")
    if gpu is None and kind:
        is_called = has_recipe(kind)
        way = "one compiled call each" if is_called else "the model's modules: no recipe"
        if is_called and _turns_alike(store.config):
            way += "; prompts in parts, a call each"
        console.print(f"tokens of {kind}: {way}")
        console.print(printable(f"text of {kind}: {way_of_texts}"))
    if gpu is None and planned.capacity < planned.num_experts and is_computed:
        _suggest_form(console, arguments.path)
    left = (free_host_bytes() if gpu is None else gpu.free_bytes()) - planned.slots_bytes
    room = planned.headroom
    needed = room.nbytes - room.spare_bytes
    if left < needed:
        console.print(
            f"the slots leave {format_bytes(left)}; trunk, KV cache and staging need "
            f"{format_bytes(needed)}, unless they are in memory already",
            style="yellow",
        )
    return 0


def _text_way(store: CheckpointStore) -> str:
    """Return how commands write the checkpoint's texts."""
    # Of no use to --help.
    from moecache.commands.without_torch import text_way

    try:
        return text_way(store)
    except MoeCacheError as error:
        return f"cannot be written: {error}"


def _turns_alike(config: Mapping[str, Any]) -> bool:
    """Return whether a position's angles do not depend on how long a text is."""
    own = config.get("text_config", config)
    said = own.get("rope_parameters") or own.get("rope_scaling") or {}
    each = [said, *(one for one in said.values() if isinstance(one, Mapping))]
    kinds = {one.get("rope_type", one.get("type", "default")) for one in each}
    return not kinds & {"dynamic", "longrope", "su"}


def _why_no_graphs(config: Mapping[str, Any], planned: Plan) -> str:
    """Return why tokens on a GPU are no graphs, as far as the files say; empty if they are."""
    try:
        check_experts(planned.layout)
    except ConfigError:
        return "not every layer's experts have kernels"
    top_k, slots = planned.layout.top_k, planned.capacity
    if top_k and slots < top_k:
        return f"a token asks for {top_k} experts of a layer, and there are {slots} slots"
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    kinds = text.get("layer_types")
    named = {kind for kind in kinds if isinstance(kind, str)} if isinstance(kinds, list) else set()
    others = sorted(named - _KEPT)
    if text.get("attention_chunk_size"):
        others.append("attention by chunks")
    if any(name.startswith(("mamba_", "linear_", "ssm_", "conv_")) for name in text):
        others.append("states")
    return f"no graph holds {printable(', '.join(others))}" if others else ""


def _mtp(found: Mapping[str, int]) -> str:
    """Return what is said of the layers that the model does not run."""
    if not found:
        return ""
    shown = ", ".join(itertools.islice(found, 3)) + (", ..." if len(found) > 3 else "")
    return (
        f"MTP: {shown} ({format_bytes(sum(found.values()))}), to guess further tokens: not run, "
        "and not in slots"
    )


def _quantized(store: CheckpointStore) -> str:
    """Return how the checkpoint is quantized: the formats of its experts and of its trunk."""
    if not store.quantization:
        return ""
    layers = store.layout.layers
    by_role = [
        f"{name} {_counted(map(_format_of, roles), ' layers')}"
        for name in store.layout.role_names
        if not name.endswith("_bias")
        and (roles := [role for layer in layers for role in layer if role.name == name])
    ]
    experts = f"experts: {', '.join(by_role)}; " if by_role else ""
    formats = [matrix.format.name for matrix, _ in store.trunk_matrices.values()]
    trunk = f"{len(formats)} matrices in {_counted(formats)}" if formats else "not quantized"
    return f"quantized with {store.quantization}; {experts}trunk: {trunk}"


def _format_of(role: Role) -> str:
    return role.format or str(role.dtype)


def _counted(names: Iterable[str], unit: str = "") -> str:
    """Return names, the most frequent first; if they are several, how often each is there."""
    counts = Counter(names).most_common()
    if len(counts) == 1:
        return counts[0][0]
    return " and ".join(f"{name} ({count}{unit})" for name, count in counts)


def _compute(planned: Plan, *, measures: bool) -> str:
    """Return what kernels would compute with, and how much weight a token's experts have."""
    layout = planned.layout
    formats = {_format_of(role) for roles in layout.layers for role in roles}
    named = {role.format for roles in layout.layers for role in roles} - {""}
    if planned.gpu is not None:
        try:
            check_experts(layout)
        except ConfigError as error:
            return f"no kernels on a GPU{'' if named else ', so that torch multiplies'}: {error}"
    formless = sorted(name for name in named if not kernels.has_form(name))
    if formless and planned.gpu is None:
        return f"{', '.join(formless)}: no compute form, so that torch multiplies the values"
    stats = ComputeStats(
        compute="fast",
        level=kernels.level() if planned.gpu is None else "cuda",
        num_threads=kernels.num_threads() if planned.gpu is None else 0,
        formats=tuple(sorted(formats)),
        expert_bytes=layout.top_k * sum(map(layout.expert_bytes, range(layout.num_layers))),
        # The host's memory is none of a GPU's business.
        bytes_per_s=(None if planned.gpu else bandwidth(planned.profile, measures=measures)),
    )
    described = f'with compute="fast": {stats.describe()}'
    if planned.gpu is None and kernels.amx_is_refused():
        described += "; the system refuses AMX to this process, so that prompts take longer"
    return described


def _suggest_form(console: Console, path: str) -> None:
    """Say what experts in compute form would cost and save, if they are worth it here."""
    # Imported here: it takes 7 MiB.
    from moecache.packing import estimate_form

    try:
        with open_store(path) as store:
            estimate = estimate_form(store)
    except StoreError as error:
        console.print(f"whether packing pays was not measured: {printable(error)}", style="yellow")
        return
    if estimate is not None and estimate.pays:
        console.print(
            f"pack it: moecache pack --compute-form {printable(shlex.quote(path))} OUT writes "
            f"{estimate.describe()}",
            style="green",
        )


def _memory_table(planned: Plan) -> Table:
    """Return what there is, and what stays free beside the slots."""
    import psutil

    machine, gpu, room = psutil.virtual_memory(), planned.gpu, planned.headroom
    table = Table("memory", "free", "of")
    table.add_row("machine", format_bytes(machine.available), format_bytes(machine.total))
    if gpu is not None:
        table.add_row(gpu.description, format_bytes(gpu.free_bytes()), "")
    for group in cgroup_limits():
        table.add_row(
            f"cgroup {printable(group.path)}",
            format_bytes(group.room_bytes),
            format_bytes(group.limit_bytes),
        )
    table.add_section()
    parts = {
        "trunk": room.trunk_bytes,
        f"KV cache, {room.context_tokens} tokens": room.kv_cache_bytes,
        **({"states": room.state_bytes} if room.state_bytes else {}),
        **({"reads' staging buffers": room.staging_bytes} if gpu is None else {}),
        "to spare": room.spare_bytes,
    }
    if planned.reserve_bytes != room.nbytes:
        parts = {f"reserve ({planned.reasons['reserve']})": planned.reserve_bytes}
    for name, nbytes in parts.items():
        table.add_row(name, f"- {format_bytes(nbytes)}", "")
    table.add_section()
    free = free_host_bytes() if gpu is None else gpu.free_bytes()
    table.add_row("for slots", format_bytes(max(0, free - planned.reserve_bytes)), "")
    return table


def _plan_table(planned: Plan) -> Table:
    """Return what `open` would do, and why."""
    table = Table("plan", "", "because of")
    for name, value, why in planned.rows():
        table.add_row(name, printable(value), printable(why))
    return table


def _layer_table(layout: ExpertLayout) -> Table:
    """Return the roles of every layer, layers that are alike in one row."""
    table = Table("layers", "role", "shape", "format", "bytes")
    alike: dict[tuple[Role, ...], list[int]] = {}
    for layer, roles in enumerate(layout.layers):
        alike.setdefault(tuple(roles), []).append(layer)
    for roles, layers in alike.items():
        more = " ..." if len(layers) > 1 else ""
        label = f"{_spans(layers)}  {printable(layout.layer_names[layers[0]])}{more}"
        for index, role in enumerate(roles):
            table.add_row(
                label if index == 0 else "",
                role.name,
                " x ".join(map(str, role.shape)),
                _format_of(role),
                format_bytes(role.nbytes),
            )
    return table


def _spans(numbers: list[int]) -> str:
    """Return ascending numbers, those that follow each other as one span: 0-3, 6."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)
