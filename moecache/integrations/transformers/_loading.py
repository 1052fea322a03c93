"""`load`: a model without its experts, which are read into slots as they are needed."""

import copy
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

from moecache import kernels
from moecache.cuda import parse_device
from moecache.errors import ConfigError
from moecache.integrations.transformers._arguments import (
    AUTOMATIC,
    check_arguments,
    check_keywords,
    check_names,
)
from moecache.integrations.transformers._fast import check_compute
from moecache.integrations.transformers._gguf import (
    find_model_config,
)
from moecache.integrations.transformers._joining import join, local_device
from moecache.integrations.transformers._kernels import check_on_device
from moecache.integrations.transformers._offload import Offload
from moecache.integrations.transformers._parallel import facts_of
from moecache.integrations.transformers._quantizer import MoeCacheConfig
from moecache.integrations.transformers._ranks import Ranks
from moecache.integrations.transformers._slots import device_of
from moecache.prefault.mappings import read_mappings, split
from moecache.prefault.sweep import Progress
from moecache.prefetch.predict import Predictor
from moecache.ranks import Placement, Share
from moecache.runtime.open import open  # noqa: A004 - moecache.open
from moecache.stores import GgufStore, is_gguf, open_store
from moecache.stores._checkpoint import read_config
from moecache.stores._paths import check_model
from moecache.stores._quantized import Quantization
from moecache.stores._versions import unchanged, versions_of

# What torch's products take and keep; some of it is compiled for each number of rows. Measured were
# 230 MiB after a prompt of 512, and 16 in decoding alone.
_TORCH_BYTES = 256 * 2**20
_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def load(
    path: str | os.PathLike[str],
    memory: int | str | None = None,
    device: str = "cpu",
    *,
    slots: int | None = None,
    policy: str | None = None,
    scope: str | None = None,
    prefetch: str | Predictor | None = None,
    read: str | None = None,
    reserve: int | str | None = None,
    lock: bool | None = None,
    profile: str | os.PathLike[str] | None = None,
    loader_threads: int | None = None,
    prefault: str | None = None,
    progress: Progress | None = None,
    record_trace: str | os.PathLike[str] | None = None,
    warmpin: int | str | None = None,
    warmpin_after: int | None = None,
    compute: str | None = None,
    num_threads: int | None = None,
    trunk: str | None = None,
    model_class: Any = None,
    expert_parallel: Any = None,
    placement: str | os.PathLike[str] | Placement | None = None,
    rank_timeout_s: float | None = None,
    **from_pretrained: Any,
) -> Any:
    """Load a mixture-of-experts model with its experts in a bounded amount of memory.

    Only the trunk is read. Experts are read from the checkpoint's own files when a token
    needs them, and kept in slots. The model is an ordinary one otherwise, and its output
    that of the same model completely in memory, bit for bit on the CPU (experts
    implementation "grouped_mm", transformers' default). `model.moecache` has the figures,
    `detach()` and `close()`.

    Parameters
    ----------
    path : str or Path
        A checkpoint directory, a GGUF file (the first of a split one, or its directory), or a
        name on the model hub.
    memory : int or str, optional
        Bytes for experts, such as "4GiB", or a share of them, "25%": what the trunk and
        the KV cache take comes on top. By default MOECACHE_MEMORY, else what is free
        when the trunk is loaded, less `reserve`.
    device : str, default "cpu"
        Where trunk and slots are: "cpu", or a GPU, "cuda" or "cuda:1". There the slots hold
        what the file holds: `dtype` must be the checkpoint's own, as it is by default.
    prefetch : {"auto", "router", "echo", "last", "off"} or Predictor, optional
        Which guesses are read before a layer asks. "router": those of the next layer's
        own router, applied to this layer's input. "auto": the same, as long as tokens
        are faster with it than without. The others as for `moecache.open`. By default
        MOECACHE_PREFETCH, else "auto".
    slots, policy, scope, read, reserve, lock, profile, loader_threads, prefault, progress, \
record_trace, warmpin, warmpin_after
        See `moecache.open`.
    compute : {"torch", "fast", "fast-int8"}, optional
        What multiplies; by default "torch", and "fast" where experts are in a format such as
        q4_0. "torch": transformers' own products, of such experts' values. "fast": moecache's
        kernels, for experts and for the trunk's linear layers where there are up to 8 rows; with
        AVX-512's products of bfloat16 at the speed at which weights can be read. Sums are float32
        in an order of their own, and the activations between an expert's products are rounded once:
        the output is that of the same model at any number of slots and threads, bit for bit,
        but not transformers'. "fast-int8": the same with activations of 8 bits for experts of
        q8_0 and q4_0, for processors without products of bfloat16; refused if none has these
        formats. On a GPU "fast" is for the experts alone, see docs/cuda.md.
    num_threads : int, optional
        Threads of the kernels, of all models of the process. By default MOECACHE_THREADS, else
        the cores that the process may use.
    trunk : {"bf16", "native"}, optional
        Of a quantized checkpoint, what becomes of the linear layers that are no experts': values
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
    **from_pretrained
        Passed on, such as `dtype`, `attn_implementation` or `revision`. `device_map` "auto" and
        "sequential" mean `device`.

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
    ranks = None
    if expert_parallel:
        device = local_device(device)
        ranks = join(expert_parallel, torch.device(device), rank_timeout_s)
    elif placement is not None or rank_timeout_s is not None:
        raise ConfigError("placement and rank_timeout_s are for expert_parallel=True")
    # What fails on one rank, the others are told.
    with nullcontext() if ranks is None else ranks:
        check_arguments(device, from_pretrained)
        if from_pretrained.get("device_map") in AUTOMATIC:
            del from_pretrained["device_map"]
        # Before the trunk is read, which may take minutes.
        check_compute("torch" if compute is None else compute)
        if compute == "fast-int8" and parse_device(device) is not None:
            raise ConfigError(f'compute="fast-int8" multiplies in RAM, not on {device}; use "fast"')
        if trunk == "native" and parse_device(device) is not None:
            raise ConfigError(f'trunk="native" is computed in RAM, not on {device}; use "bf16"')
        check_names(policy=policy, scope=scope, read=read, prefetch=prefetch, trunk=trunk)
        if num_threads is not None:
            kernels.use_threads(num_threads)
        check_model(path)
        on_host = parse_device(device) is None
        given = path, on_host, model_class, from_pretrained
        if is_gguf(Path(path)):
            model = _make_of_gguf(*given, trunk, compute)
        else:
            model = _make(*given, trunk or "bf16", compute)
        directory, versions, layers, dtype, usual = model.__dict__.pop("_moecache_source")
        compute = compute or usual
        if expert_parallel and compute != "torch" and not on_host:
            raise ConfigError(
                f'compute="fast" on {device} is for one process; with expert_parallel use "torch"'
            )
        with unchanged(versions) as check:
            share = None if ranks is None else _share_of(ranks, directory, layers, placement)
            runtime = open(
                directory,
                memory,
                device,
                slots=slots,
                policy=policy,
                scope=scope,
                dtype=dtype if on_host else None,
                read=read,
                reserve=reserve,
                lock=lock,
                profile=profile,
                loader_threads=loader_threads,
                # The predictor that the look-ahead replaces; it still guesses for the first layer.
                prefetch="echo" if prefetch == "router" else prefetch,
                prefault=prefault,
                progress=progress,
                record_trace=record_trace,
                warmpin=warmpin,
                warmpin_after=warmpin_after,
                layers=layers,
                host_bytes=_host_bytes(model, compute) if on_host else None,
                share=share,
            )
        try:
            check(runtime.store)
            # After the slots, whose plan leaves room for it.
            model = model.to(device_of(runtime))
            Offload(
                model,
                runtime,
                look_ahead=True if prefetch == "router" else None,
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


def _share_of(
    ranks: Ranks,
    directory: Any,
    layers: Any,
    placement: str | os.PathLike[str] | Placement | None,
) -> Share | None:
    """Return this rank's share of a checkpoint's experts; `None` if it is the only rank."""
    if isinstance(placement, (str, os.PathLike)):
        placement = Placement.load(placement)
    with open_store(directory, mapped=False, layers=layers) as store:
        ranks.place(store.layout, placement)
    return ranks.share


def _make(
    path: str | os.PathLike[str],
    on_host: bool,
    model_class: Any,
    from_pretrained: dict[str, Any],
    trunk: str,
    compute: str | None,
) -> Any:
    """Return the model of a checkpoint's directory without its experts."""
    hub = {name: from_pretrained[name] for name in _HUB if name in from_pretrained}
    config = find_config(path, hub, from_pretrained)
    check_keywords(load, model_class or find_model_class(config), config, from_pretrained)
    if _quantized_parts(config):
        if not on_host and Path(path).is_dir():
            # Before the trunk is read.
            with open_store(path) as store:
                check_on_device(store.layout, compute)
        from_pretrained = _without_quantization(path, config, from_pretrained)
    if model_class is None:
        model_class = find_model_class(config)
    return model_class.from_pretrained(
        path, **{**from_pretrained, "quantization_config": MoeCacheConfig(trunk)}
    )


def _make_of_gguf(
    path: str | os.PathLike[str],
    on_host: bool,
    model_class: Any,
    from_pretrained: dict[str, Any],
    trunk: str | None,
    compute: str | None,
) -> Any:
    """Return the model of a GGUF file without its experts."""
    for name in ("config", *_HUB):
        if from_pretrained.get(name) is not None:
            raise ConfigError(f"{name} cannot be given to load with a GGUF file, which has it all")
    check_keywords(load, model_class, None, from_pretrained)
    with open_store(path) as store:
        if not on_host:
            check_on_device(store.layout, compute)
        assert isinstance(store, GgufStore)
        config, versions = find_model_config(store), versions_of(store)
        compute = compute or kernels.default_compute(store.layout)
        if on_host and trunk is None and compute != "torch":
            trunk = "native"
    kept = MoeCacheConfig(trunk or "bf16", str(path), versions)
    # transformers has nothing to read.
    given = {**from_pretrained, "config": config, "state_dict": {}, "quantization_config": kept}
    return (model_class or find_model_class(config)).from_pretrained(None, **given)


def find_config(
    path: str | os.PathLike[str], hub: dict[str, Any], from_pretrained: dict[str, Any]
) -> Any:
    """Return the configuration of a checkpoint, or the one that was given."""
    config = from_pretrained.get("config")
    if isinstance(config, transformers.PretrainedConfig):
        return config
    if config is None and os.path.isdir(path):
        # transformers stumbles over what is no object there.
        _check_quantization(path, read_config(Path(path) / "config.json"))
    trusted = {"trust_remote_code": from_pretrained.get("trust_remote_code")}
    return transformers.AutoConfig.from_pretrained(config or path, **hub, **trusted)


def find_model_class(config: Any) -> Any:
    """Return the class whose `from_pretrained` loads a checkpoint."""
    if hasattr(config, "auto_map"):
        return transformers.AutoModelForCausalLM  # code of the checkpoint's own
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    return transformers.AutoModelForCausalLM


def _quantized_parts(config: Any) -> list[Any]:
    """Return what of a configuration says that the checkpoint is quantized."""
    text = config.get_text_config(decoder=True)
    levels = (config,) if text is config else (config, text)
    return [level for level in levels if getattr(level, "quantization_config", None) is not None]


def _check_quantization(path: str | os.PathLike[str], config: dict[str, Any]) -> None:
    """Raise ConfigError if a configuration says that something is quantized in an unknown way."""
    try:
        Quantization(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _without_quantization(
    path: str | os.PathLike[str], config: Any, from_pretrained: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments for transformers, which is told of a model that is not quantized.

    Raises
    ------
    ConfigError
        If nothing here reads what it is quantized with.
    """
    said = _quantized_parts(config)[0].quantization_config
    said = said.to_dict() if hasattr(said, "to_dict") else said
    _check_quantization(path, {"quantization_config": said or {"quant_method": ""}})
    config = copy.deepcopy(config)
    for level in _quantized_parts(config):
        del level.quantization_config
    # What transformers would take the dtype from are codes.
    usual = {} if config.dtype else {"dtype": torch.bfloat16}
    return {**usual, **from_pretrained, "config": config}


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
