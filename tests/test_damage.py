"""Documents that are damaged in any way: a result, or an error of the project, in bounded memory.

`pytest tests/test_damage.py -s --timeout=0 --hypothesis-profile=damage` tries 50,000 of each kind,
with --hypothesis-seed=N others than those of seed 0.
"""

import hashlib
import io
import json
import math
import random
import struct
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from moecache import kernels, packing
from moecache.errors import MoeCacheError
from moecache.profiles.file import ModelUsage, read_profile, update_profile
from moecache.slots import HostSlots
from moecache.stores import GgufStore, open_store
from moecache.study import Trace, load_any, statistics
from moecache.study._journal import Journal
from moecache.study.advice import expert_size
from tests.helpers.checkpoints import read_expert, write_checkpoint
from tests.helpers.damage import (
    Spoil,
    bounded_memory,
    spoil,
    spoil_behind_length,
    spoil_gguf,
    spoil_json,
    spoil_npy,
    spoil_npz,
)
from tests.helpers.examples import num_examples
from tests.helpers.gguf_files import string, u32, write_gguf, write_raw
from tests.helpers.quantized import SCHEMES, write_experts
from tests.helpers.traces import random_trace


class Kind(NamedTuple):
    """Documents of one kind: whole ones, what damages and what reads them."""

    documents: list[bytes]
    path: Path  # where a document is put
    spoil: Spoil
    read: Callable[[Path], object]


def use_trace(path: Path) -> None:
    """Read a trace, and all that commands say of one."""
    trace = load_any(path)
    trace.describe()
    json.dumps(dict(trace.metadata))
    if trace.num_experts < 1000:
        statistics(trace).describe()
    with suppress(MoeCacheError):
        expert_size(trace, None)


def lines(*values: Any) -> bytes:
    """Return JSON lines."""
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def saved(function: Callable[..., None], *arguments: Any, **arrays: Any) -> bytes:
    """Return what NumPy writes."""
    file = io.BytesIO()
    function(file, *arguments, **arrays)
    return file.getvalue()


def make_traces(directory: Path) -> Kind:
    """Return traces with and without what is optional."""
    documents = []
    for seed in range(3):
        path = directory / "whole.npz"
        trace = random_trace(seed, num_tokens=6 * seed + 2, num_sequences=2, padding=seed / 5)
        Trace(
            trace.experts,
            num_experts=8,
            step=trace.step,
            bulk=trace.step % 2,
            layers=[1, 2, 5],
            model="m",
            expert_bytes=4096,
        ).save(path) if seed else trace.save(path)
        documents.append(path.read_bytes())
    return Kind(documents, directory / "a.npz", spoil_npz, use_trace)


def make_routed_arrays(directory: Path) -> Kind:
    """Return what vLLM routed, as .npz."""
    ids = random_trace(1).experts
    documents = [
        saved(np.savez, routed_experts=ids),
        saved(np.savez_compressed, routed_experts=ids.astype("u1"), prompt_routed_experts=ids[:3]),
    ]
    return Kind(documents, directory / "a.npz", spoil_npz, use_trace)


def make_arrays(directory: Path) -> Kind:
    """Return the same as .npy."""
    ids = random_trace(1).experts
    documents = [saved(np.save, ids.astype(dtype)) for dtype in ("i2", ">u4", "i8", "u8", "u1")]
    documents.append(saved(np.save, np.asfortranarray(ids)))
    return Kind(documents, directory / "a.npy", spoil_npy, use_trace)


def make_responses(directory: Path) -> Kind:
    """Return the same as JSON lines."""
    import base64

    ids = random_trace(1, num_tokens=5).experts
    encoded = base64.b64encode(saved(np.save, ids)).decode()
    documents = [
        lines({"routed_experts": ids.tolist(), "usage": {"prompt_tokens": 2}}),
        lines({"choices": [{"routed_experts": encoded}, {"routed_experts": encoded}]}),
        lines({"prompt_routed_experts": ids[:2].tolist(), "routed_experts": ids.tolist()}),
    ]
    return Kind(documents, directory / "a.jsonl", spoil, use_trace)


def make_lines(directory: Path) -> Kind:
    """Return the other forms of JSON lines."""
    documents = [
        lines(*[[[layer, token + layer] for layer in range(3)] for token in range(4)]),
        lines(*[{"l": layer, "t": 2, "e": [[1, 2], [3, layer + 4]]} for layer in range(3)]),
        lines(*[{"layer": 0, "token": token, "experts": [token, 9]} for token in range(3)]),
    ]
    return Kind(documents, directory / "a.jsonl", spoil, use_trace)


def make_csv(directory: Path) -> Kind:
    """Return a route trace of BigMoeOnEdge."""
    rows = [
        f"{turn},{phase},{step},{layer},{slot},{3 * slot + layer}"
        for turn in range(2)
        for phase, step in ((0, 0), (0, 1), (1, 2))
        for layer in range(2)
        for slot in range(2)
    ]
    head = "# route_trace v1\n# model=/m.gguf n_expert=16\n# layer=1 expert_bytes=4096\n"
    columns = "turn,phase,step,layer,slot,expert"
    document = "\n".join([head + columns, *rows]).encode()
    return Kind([document], directory / "a.csv", spoil, use_trace)


def make_manifest(directory: Path) -> Kind:
    """Return the manifest of a packed checkpoint."""
    write_checkpoint(directory / "model", num_layers=2, num_experts=3)
    packing.pack(directory / "model", directory / "out")
    path = directory / "out" / "moecache-pack.json"
    document = path.read_bytes()
    return Kind([document], path, spoil_json, lambda path: packing.verify(path.parent))


def make_profile(directory: Path) -> Kind:
    """Return profiles, most of whose checksums are right."""
    usage = ModelUsage(
        "echo",
        np.arange(6, dtype=np.uint64).reshape(2, 3),
        np.arange(3, dtype=np.int32),
        {"values": np.ones((2, 3), np.float32), "masks": np.ones((2, 1), np.uint64)},
    )
    path = directory / "a.profile"
    update_profile(path, disks={"one": {"bytes_per_s": 1e9}}, models={"m": usage})

    def spoil_body(rng: random.Random, document: bytes) -> bytes:
        if rng.random() < 0.2:
            return spoil(rng, document)
        first, _, body = document.partition(b"\n")
        header, _, rest = body.partition(b"\n")
        body = rng.choice((spoil, spoil_json))(rng, header) + b"\n" + rest
        body = spoil(rng, body) if rng.random() < 0.2 else body
        return first[:-64] + hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    def use(path: Path) -> None:
        # Now and then, as it waits for the disk.
        if path.stat().st_size % 16 == 0:
            update_profile(path, disks={"two": {}})
            assert "two" in read_profile(path).disks
        else:
            read_profile(path)

    return Kind([path.read_bytes()], path, spoil_body, use)


def make_journal(directory: Path) -> Kind:
    """Return what a sweep resumes from."""
    path = directory / "a.journal"
    with Journal(path) as journal:
        for cell in ("one", "two"):
            figures = {"num_accesses": 4, "num_hits": 2, "seconds": 0.5}
            rates = {"prefill_hit_rate": None, "decode_hit_rate": 0.5}
            journal.add(cell, {**figures, **rates, "layer_hits": [2], "layer_misses": [2]})

    def use(path: Path) -> None:
        with Journal(path):
            pass

    return Kind([path.read_bytes()], path, spoil, use)


def make_header(directory: Path) -> Kind:
    """Return a checkpoint's file, damaged in its header."""
    write_checkpoint(directory / "model", num_layers=2, num_experts=3)
    (path,) = (directory / "model").glob("*.safetensors")
    return Kind([path.read_bytes()], path, spoil_behind_length, use_store)


def make_index(directory: Path) -> Kind:
    """Return the index of a checkpoint in several files."""
    write_checkpoint(directory / "model", num_layers=2, num_experts=3, num_shards=2)
    path = directory / "model" / "model.safetensors.index.json"
    return Kind([path.read_bytes()], path, spoil_json, use_store)


def make_config(directory: Path) -> Kind:
    """Return the config.json of a checkpoint."""
    write_checkpoint(directory / "model", num_layers=2, num_experts=3)
    path = directory / "model" / "config.json"
    return Kind([path.read_bytes()], path, spoil_json, use_store)


def make_quantized(directory: Path, scheme: str, file: str) -> Kind:
    """Return a file of a quantized checkpoint."""
    model = directory / "model"
    write_experts(SCHEMES[scheme], model, num_layers=1, num_experts=2)
    path = model / file
    how = spoil_json if file == "config.json" else spoil_behind_length
    return Kind([path.read_bytes()], path, how, use_quantized)


def make_packed(directory: Path, form: str) -> Kind:
    """Return the file of a packed checkpoint whose experts are in compute form."""
    if form == "packed gguf":
        pytest.importorskip("gguf")
        model = write_gguf(directory / "m.gguf", num_experts=2).path
        out = packing.pack(model, directory / "out", compute_form=True).path
        path = out / "m-00001-of-00002.gguf"
        how: Spoil = spoil_gguf
    else:
        write_experts(SCHEMES["int4"], directory / "model", num_layers=1, num_experts=2)
        plain = packing.pack(directory / "model", directory / "plain", format="bf16").path
        out = packing.pack(plain, directory / "out", format=form).path
        path, how = out / "experts.safetensors", spoil_behind_length
    whole = path.read_bytes()

    def spoil_any(rng: random.Random, document: bytes) -> bytes:
        if rng.random() < 0.5:
            return how(rng, document)
        damaged = bytearray(document)
        for _ in range(rng.randrange(1, 20)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        return bytes(damaged)

    def use(path: Path) -> None:
        # Checksums tell; what is computed all the same is what the bytes say.
        with suppress(MoeCacheError) if path.read_bytes() != whole else nullcontext():
            packing.verify(path.parent)
            assert path.read_bytes() == whole
        use_quantized(path)
        with open_store(path.parent) as store, HostSlots(store.layout, 1) as pool:
            roles = store.layout.layers[0]
            parts = pool.buffers(0, 0)
            store.read_into(0, 0, parts)
            pool.upload(0, 0, parts)
            kernel = kernels.SlotKernel(lambda slot: pool.expert(slot, 0), 1, roles=roles)
            inputs = np.ones((1, kernel.hidden_size), np.float32)
            ids = np.zeros(1, np.int64)
            rows = np.empty_like(inputs)
            kernel.compute(inputs, ids.astype(np.int32), np.array([0, 1]), ids, 1, rows)

    return Kind([whole], path, spoil_any, use)


def make_gguf(directory: Path, experts: str) -> Kind:
    """Return a GGUF file of experts, of all in one or each by itself, or a part that has them."""
    texts = b"".join(string(f"token {n}") for n in range(9))
    metadata = [
        ("general.architecture", 8, "a"),
        ("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 9) + texts),
        *(u32(f"a.{key}", 2) for key in ("expert_count", "expert_used_count", "block_count")),
    ]
    names, sizes, kind = [".0", ".1"], [32, 32], 8
    if experts == "gguf stack":
        names, sizes = ["_exps"], [*sizes, 2]
    trunk = [("token_embd.weight", [32, 3], 2, 0), ("norm.weight", [5], 0, 64)]
    tensors, end = [*trunk], 96
    for piece in ("gate", "up", "down"):
        for name in names:
            tensors.append((f"blk.1.ffn_{piece}{name}.weight", sizes, kind, end))
            end += math.prod(sizes) // 32 * 34
    path = directory / "a.gguf"
    data = np.random.default_rng(0).integers(60, size=end).astype(np.uint8).tobytes()
    if experts == "gguf part":
        path, tensors = directory / "a-00002-of-00002.gguf", tensors[2:]
        said = [u32("split.count", 2), u32("split.tensors.count", len(tensors) + len(trunk))]
        first = path.with_name("a-00001-of-00002.gguf")
        write_raw(first, [*metadata, *said], trunk, data[:96])
        metadata = [*said, u32("split.no", 1)]
    write_raw(path, metadata, tensors, data)
    return Kind([path.read_bytes()], path, spoil_gguf, use_gguf)


def use_gguf(path: Path) -> None:
    """Open the file, look at all it says, and read what it has."""
    use_quantized(path)
    with open_store(path) as store:
        assert isinstance(store, GgufStore)
        str(dict(store.metadata))
        str((store.trunk_bytes, store.quantization, store.config))
        for name in store.tensor_names:
            store.read_tensor(name)


def use_quantized(path: Path) -> None:
    """Open the checkpoint, read its trunk, and bring an expert into a slot."""
    with open_store(path.parent) as store:
        for name in store.trunk_matrices:
            store.read_matrix(name)
        roles = store.layout.layers[0] if store.layout.num_layers else ()
        parts = {role.name: np.empty(role.array_shape, role.dtype) for role in roles}
        if roles:
            store.read_into(0, 0, parts)
            with HostSlots(store.layout, 1) as pool:
                pool.upload(0, 0, parts)


def use_store(path: Path) -> None:
    """Open the checkpoint that a file belongs to, and read an expert of each layer."""
    with open_store(path.parent) as store:
        for layer in range(store.layout.num_layers):
            read_expert(store, layer, 0)


@pytest.mark.filterwarnings("ignore::UserWarning:zipfile")
@pytest.mark.parametrize(
    "make",
    [
        make_traces,
        make_routed_arrays,
        make_arrays,
        make_responses,
        make_lines,
        make_csv,
        make_manifest,
        make_profile,
        make_journal,
        make_header,
        make_index,
        make_config,
        *(
            partial(make_gguf, experts=experts)
            for experts in ("gguf stack", "gguf single", "gguf part")
        ),
        *(partial(make_packed, form=form) for form in ("q8_0", "nvfp4", "packed gguf")),
        *(
            partial(make_quantized, scheme=scheme, file=file)
            for scheme in ("fp8", "int4", "mxfp4", "nvfp4", "gptq_ordered")
            for file in ("config.json", "model.safetensors")
        ),
    ],
    ids=lambda make: getattr(make, "__name__", None) or " ".join(make.keywords.values()),
)
def test_a_damaged_document_is_read_or_refused(
    make: Callable[[Path], Kind], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Whatever else is raised names the document that a run of the same seed makes again."""
    kind = make(tmp_path)
    for document in kind.documents:
        kind.path.write_bytes(document)
        kind.read(kind.path)
    seed = request.config.getoption("hypothesis_seed", None) or 0
    num_read = 0
    with bounded_memory():
        for number in range(num_examples(50)):
            rng = random.Random(f"{request.node.name} {seed} {number}")
            document = kind.spoil(rng, rng.choice(kind.documents))
            # ext4 waits for the disk when a file is cut to nothing and written again.
            kind.path.unlink()
            kind.path.write_bytes(document)
            try:
                kind.read(kind.path)
                num_read += 1
            except MoeCacheError:
                pass
            except BaseException as error:
                error.add_note(f"--hypothesis-seed={seed}, document {number}: {document[:2000]!r}")
                raise
    print(f"{request.node.name} seed={seed}: {num_read} of {number + 1} were read")  # noqa: T201
