"""`load`: a model without its experts, which are read into slots as they are needed."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from moecache import kernels
from moecache.cuda import parse_device
from moecache.errors import ConfigError
from moecache.integrations.hub import look_up
from moecache.integrations.hub_download import resolve
from moecache.integrations.transformers._arguments import (
    AUTOMATIC,
    check_arguments,
    check_keywords,
    check_names,
    split_options,
    torch_dtype,
)
from moecache.integrations.transformers._configuration import (
    find_config,
    find_model_class,
    quantized_parts,
    without_quantization,
)
from moecache.integrations.transformers._damage import FILES, Damage, check_generation
from moecache.integrations.transformers._fast import check_compute
from moecache.integrations.transformers._gguf import find_model_config
from moecache.integrations.transformers._joining import join, local_device
from moecache.integrations.transformers._kernels import check_on_device
from moecache.integrations.transformers._offload import Offload
from moecache.integrations.transformers._parallel import facts_of
from moecache.integrations.transformers._quantizer import MoeCacheConfig
from moecache.integrations.transformers._ranks import Ranks
from moecache.integrations.transformers._slots import device_of
from moecache.integrations.transformers._source import Source
from moecache.integrations.transformers.prompts import bytes_per_token, planned_bytes
from moecache.layout import ExpertLayout
from moecache.prefault.mappings import read_mappings, split
from moecache.ranks import Placement, Share
from moecache.runtime.open import open  # noqa: A004 - moecache.open
from moecache.settings import DEFAULT_PREFAULT, Settings, parse_prefault
from moecache.sizing.headroom import states_per_text
from moecache.stores import CheckpointStore, GgufStore
from moecache.stores._checkpoint import read_config
from moecache.stores._paths import check_model
from moecache.units import parse_bytes

# Memory that torch's products take and keep, partly for code compiled for each number of rows:
# measured were 230 MiB after a prompt of 512, and 16 in decoding alone.
_TORCH_BYTES = 256 * 2**20
_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def load(
    path: str | os.PathLike[str] | CheckpointStore,
    memory: int | str | None = None,
    device: str = "cpu",
    *,
    compute: str | None = None,
    num_threads: int | None = None,
    trunk: str | None = None,
    model_class: Any = None,
    expert_parallel: Any = None,
    placement: str | os.PathLike[str] | Placement | None = None,
    rank_timeout_s: float | None = None,
    prefix_memory: int | str = 0,
    **keywords: Any,
) -> Any:
    """Load a mixture-of-experts model with its experts in a bounded amount of memory.

    Only the trunk is read. Experts are read from the checkpoint's own files when a token
    needs them, and kept in slots. The model is an ordinary one otherwise, and its output
    that of the same model completely in memory, bit for bit on the CPU (experts
    implementation "grouped_mm", transformers' default). `model.moecache` has the figures,
    `detach()` and `close()`.

    Parameters
    ----------
    path : str, Path or CheckpointStore
        A checkpoint directory, a GGUF file (the first of a split one, or its directory), or a
        name on the model hub: `user/repo`, `user/repo:Q4_K_M` for a quantisation in GGUF,
        `user/repo@revision`. Or a checkpoint that is open: it is closed with the model, and
        also on an error.
    memory : int or str, optional
        Bytes for experts, such as "4GiB", or a share of them, "25%": the trunk and
        the KV cache come on top. By default MOECACHE_MEMORY, else what is free
        when the trunk is loaded, less `reserve`.
    device : str, default "cpu"
        The device of trunk and slots: "cpu", or a GPU, "cuda" or "cuda:1". There the slots hold
        what the file holds: `dtype` must be the checkpoint's own, as it is by default.
    compute : {"torch", "fast"}, optional
        The multiplier; by default "torch", and "fast" where experts are in a format such as
        q4_0. "torch": transformers' own products, of such experts' values. "fast": moecache's
        kernels, for experts and for the trunk's linear layers where there are up to 8 rows, near
        the speed at which weights can be read. Weights of integers are multiplied by activations
        of 15 bits, sums are float32 in an order of their own: the output is that of the same model
        at any number of slots and threads, bit for bit, but not transformers'. On a GPU "fast" is
        for the experts alone, see docs/cuda.md.
    num_threads : int, optional
        Threads of the kernels, of all models of the process. By default MOECACHE_THREADS, else
        the cores that the process may use.
    trunk : {"bf16", "native"}, optional
        Form of a quantized checkpoint's linear layers that are no experts': values
        in the model's dtype; or, "native", they stay quantized, take as many bytes as in the file,
        and are computed by the kernels, for any number of rows. By default "native" for a GGUF
        file whose experts are computed by the kernels, else "bf16".
    model_class : class, optional
        Class whose `from_pretrained` is called; by default the class that the checkpoint's
        config.json names, else `AutoModelForCausalLM`.
    expert_parallel : bool or DeviceMesh, optional
        Spread the experts over the processes that torchrun started, or over those of a mesh of one
        dimension. Every process calls this with the same arguments (`memory` and what concerns
        files may differ), and then the model with the same tokens; each has the trunk, and its
        share of every layer's experts. `memory` is this process's. Paths of `profile` and
        `record_trace` get the rank's number. Output equals that of one process, bit for bit.
    placement : str, Path or Placement, optional
        Which rank has which experts, such as a file of `moecache plan-ranks`; by default all have
        as many.
    rank_timeout_s : float, default 60
        Seconds, from 1 to 86,400, after which a rank that does not answer is an error on all
        others. While ranks find each other and load, they wait 300 seconds at least.
    prefix_memory : int or str, default 0
        Bytes that pages of earlier prompts will take (`reading.open_prefixes`). Without `memory`
        they are left free, as memory for prompts always is.
    **keywords
        Options of `moecache.open` (`moecache.Options` says what each does): slots, policy, scope,
        prefetch, read, reserve, lock, profile, loader_threads, prefault, progress, record_trace,
        warmpin, warmpin_after, context_tokens. `prefetch` may also be "router": the guesses of the
        next layer's own router, applied to this layer's input, are read before it asks; "auto" is
        the same, as long as tokens are faster with it than without.
        All others go to `from_pretrained`, such as `dtype`, `attn_implementation` or `revision`.
        `device_map` "auto" and "sequential" mean `device`.

    Returns
    -------
    PreTrainedModel

    Raises
    ------
    ConfigError
        If the family or the form of the checkpoint is not supported, or an argument
        cannot be used.
    CapacityError
        If the memory does not hold an expert.
    StoreError
        If the checkpoint cannot be read, or changes meanwhile.
    TypeError
        If neither this nor `from_pretrained` has an argument.
    """
    options, from_pretrained = split_options(keywords)
    if not isinstance(path, CheckpointStore):
        path = _found(path, from_pretrained)
    ranks = None
    if expert_parallel:
        device = local_device(device)
        ranks = join(expert_parallel, torch.device(device), rank_timeout_s)
    elif placement is not None or rank_timeout_s is not None:
        raise ConfigError("placement and rank_timeout_s are for expert_parallel=True")
    on_host = parse_device(device) is None
    # A failure on one rank is told to the others.
    with nullcontext() if ranks is None else ranks, Source(path) as source:
        # Before the trunk is read, which may take minutes.
        _check(device, options, from_pretrained, compute=compute, trunk=trunk)
        check_model(source.path)
        if num_threads is not None:
            kernels.use_threads(num_threads)
        if ranks is None and on_host:
            if source.is_gguf:
                source.open()
            settings = Settings.from_environ(is_told=False)
            source.begin(settings.choose("prefault", options.get("prefault")).value)
        make = _make_of_gguf if source.is_gguf else _make
        model = make(source, model_class, from_pretrained, trunk, compute, on_host=on_host)
        compute = compute or source.compute
        if expert_parallel and compute != "torch" and not on_host:
            raise ConfigError(
                f'compute="fast" on {device} is for one process; with expert_parallel use "torch"'
            )
        source.store.keep_layers(source.layers)
        source.transpose(compute)
        share = None if ranks is None else _share_of(ranks, source.store.layout, placement)
        look_ahead = options.get("prefetch") == "router"
        if look_ahead:
            # The predictor that the look-ahead replaces; it still guesses for the first layer.
            options["prefetch"] = "echo"
        prompts_bytes = planned_bytes(model, source.store.layout.top_k, compute)
        host_bytes = _host_bytes(model, compute) + prompts_bytes + parse_bytes(prefix_memory)
        states = states_per_text(model.config.get_text_config().to_dict())
        runtime = open(
            source.take(),
            memory,
            device,
            **options,
            dtype=source.dtype if on_host else None,
            host_bytes=host_bytes if on_host else None,
            token_bytes=bytes_per_token(model) if on_host else None,
            state_bytes=states if on_host else None,
            makes_room=on_host and ranks is None,
            share=share,
        )
        try:
            # After the slots, whose plan leaves room for it.
            model = model.to(device_of(runtime))
            Offload(
                model,
                runtime,
                look_ahead=True if look_ahead else None,
                compute=compute,
                owned=True,
                ranks=ranks,
            )
            if ranks is not None:
                ranks.compare(facts_of(model, runtime, compute=compute, trunk=trunk))
        except BaseException:
            runtime.close()
            raise
        return model


def _found(path: str | os.PathLike[str], from_pretrained: dict[str, Any]) -> str | os.PathLike[str]:
    """Return where a model is, and take the arguments that were for the hub alone."""
    if from_pretrained.get("subfolder") or from_pretrained.get("force_download"):
        return path
    names = ("revision", "cache_dir", "token", "local_files_only")
    given = {name: from_pretrained[name] for name in names if from_pretrained.get(name)}
    found = resolve(path, **given)
    if found == os.fspath(path):
        return path
    for name in given:
        del from_pretrained[name]
    return found


def _check(
    device: str,
    options: dict[str, Any],
    from_pretrained: dict[str, Any],
    *,
    compute: str | None,
    trunk: str | None,
) -> None:
    """Refuse what cannot be used, before anything is read."""
    check_arguments(device, from_pretrained)
    if from_pretrained.get("device_map") in AUTOMATIC:
        del from_pretrained["device_map"]
    for name in {"dtype", "torch_dtype"} & from_pretrained.keys():
        from_pretrained[name] = torch_dtype(from_pretrained[name])
    check_compute("torch" if compute is None else compute)
    if trunk == "native" and parse_device(device) is not None:
        raise ConfigError(f'trunk="native" is computed in RAM, not on {device}; use "bf16"')
    check_names(trunk=trunk, **options)
    parse_prefault(options.get("prefault") or DEFAULT_PREFAULT)


def _share_of(
    ranks: Ranks, layout: ExpertLayout, placement: str | os.PathLike[str] | Placement | None
) -> Share | None:
    """Return this rank's share of a checkpoint's experts; `None` if it is the only rank."""
    if isinstance(placement, (str, os.PathLike)):
        placement = Placement.load(placement)
    ranks.place(layout, placement)
    return ranks.share


def _make(
    source: Source,
    model_class: Any,
    from_pretrained: dict[str, Any],
    trunk: str | None,
    compute: str | None,
    *,
    on_host: bool,
) -> Any:
    """Return the model of a checkpoint's directory without its experts."""
    path = source.path
    from_pretrained = {**from_pretrained, **look_up(path, **from_pretrained)}
    hub = {name: from_pretrained[name] for name in _HUB if name in from_pretrained}
    config = find_config(path, hub, from_pretrained)
    check_keywords(load, model_class or find_model_class(config), config, from_pretrained)
    if quantized_parts(config):
        if not on_host and Path(path).is_dir():
            # Before the trunk is read.
            check_on_device(source.open().layout, compute)
        from_pretrained = without_quantization(path, config, from_pretrained)
    if model_class is None:
        model_class = find_model_class(config)
    if os.path.isdir(path):
        # transformers goes on without one that is no JSON.
        read_config(Path(path) / "generation_config.json")
    kept = MoeCacheConfig(
        trunk or "bf16",
        source=source,
        checks_shapes=not from_pretrained.get("ignore_mismatched_sizes", False),
    )
    with Damage(path, "load the model", *FILES, arguments=from_pretrained):
        model = model_class.from_pretrained(
            path, **{**from_pretrained, "quantization_config": kept}
        )
    check_generation(path, getattr(model, "generation_config", None))
    return model


def _make_of_gguf(
    source: Source,
    model_class: Any,
    from_pretrained: dict[str, Any],
    trunk: str | None,
    compute: str | None,
    *,
    on_host: bool,
) -> Any:
    """Return the model of a GGUF file without its experts."""
    for name in ("config", *_HUB):
        if from_pretrained.get(name) is not None:
            raise ConfigError(f"{name} cannot be given to load with a GGUF file, which has it all")
    check_keywords(load, model_class, None, from_pretrained)
    store = source.open()
    assert isinstance(store, GgufStore)
    if not on_host:
        check_on_device(store.layout, compute)
    config = find_model_config(store)
    compute = compute or kernels.default_compute(store.layout)
    if on_host and trunk is None and compute != "torch":
        trunk = "native"
    kept = MoeCacheConfig(trunk or "bf16", source=source)
    # transformers has nothing to read.
    given = {**from_pretrained, "config": config, "state_dict": {}, "quantization_config": kept}
    with Damage(source.path, "build the model", arguments=from_pretrained):
        return (model_class or find_model_class(config)).from_pretrained(None, **given)


def _host_bytes(model: Any, compute: str) -> int:
    """Return what the trunk and its products will still take beside what they have."""
    mappings = read_mappings() or []
    # A trunk that transformers has only mapped counts as free, and has yet to be read.
    unread = sum(
        nbytes
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.device.type == "cpu"
        for _, nbytes, mapping in split(mappings, tensor.data_ptr(), tensor.nbytes)
        if mapping is not None and not mapping.anonymous
    )
    return unread + (_TORCH_BYTES if compute == "torch" else 0)
