"""Traces of other programs: what is understood, and what is refused with its line."""

import base64
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache.errors import ConfigError, FormatError, StoreError
from moecache.study import Trace, from_routed_experts, from_router_logits, load_any
from moecache.study.importers import FORMATS, detect_format
from tests.helpers.traces import random_trace

SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces"
others = pytest.mark.skipif(not SHARED.is_dir(), reason="no traces of others here")

CSV = """\
# route_trace v1
# model=/models/some-moe.gguf arch=x n_layer=3 n_expert=16 n_expert_used=2
# layer=1 expert_bytes=4096 dense_bytes=1
dropped,turn,phase,step,layer,slot,expert,weight
0,0,0,0,1,0,5,0.6
0,0,0,0,1,1,3,0.4
0,0,0,1,1,0,7,nan
0,0,0,1,1,1,2,nan
0,0,0,1,2,0,9,0.5
0,0,0,1,2,1,8,0.5
0,0,1,2,1,0,1,0.5
0,0,1,2,1,1,0,0.5
0,0,1,2,2,0,4,0.5
0,0,1,2,2,1,5,0.5
0,1,0,0,1,0,6,0.5
0,1,0,0,1,1,7,0.5
"""


def lines(path: Path, *values: Any) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def npy(array: Any) -> bytes:
    """Return an array as an .npy file."""
    file = io.BytesIO()
    np.save(file, np.asarray(array))
    return file.getvalue()


@others
def test_a_route_csv_equals_its_npz() -> None:
    """The original file of the traces' author, and what was made of it elsewhere."""
    found = load_any(SHARED / "bigmoe-gptoss.route.csv")
    expected = Trace.load(SHARED / "bigmoe-gptoss.npz")

    for name in ("experts", "phase", "layers", "sequence"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert found.num_experts == expected.num_experts
    assert found.metadata["model"] == expected.metadata["model"]
    assert found.metadata["expert_bytes"] == expected.metadata["expert_bytes"]
    assert found.num_steps == 65  # the prompt, and 64 tokens


@others
def test_token_pairs_are_of_the_npzs_shape() -> None:
    """Another run of the same model as nvmoe-olmoe.npz: same shape, no common token."""
    found = load_any(SHARED / "nvmoe-olmoe-smoke.tokens.jsonl", num_experts=64)
    same = Trace.load(SHARED / "nvmoe-olmoe.npz")
    raw = (SHARED / "nvmoe-olmoe-smoke.tokens.jsonl").read_text().splitlines()

    assert found.experts.shape == (47, 16, 8)
    assert found.layers.tolist() == same.layers.tolist()
    assert found.num_experts == same.num_experts
    flat = np.array([[expert for _, expert in json.loads(line)] for line in raw])
    assert np.array_equal(found.experts.reshape(47, -1), flat)


def test_a_route_csv_is_read_by_its_columns_names(tmp_path: Path) -> None:
    """Turns are sequences, a turn's prompt is one step, missing cells are padding."""
    path = tmp_path / "a.csv"
    path.write_text(CSV)
    trace = load_any(path)

    assert detect_format(path) == "route-csv"
    assert trace.experts[:, 0].tolist() == [[5, 3], [7, 2], [1, 0], [6, 7]]
    assert trace.experts[:, 1].tolist() == [[-1, -1], [9, 8], [4, 5], [-1, -1]]
    assert trace.layers.tolist() == [1, 2]
    assert trace.phase.tolist() == [0, 0, 1, 0]
    assert trace.step.tolist() == [0, 0, 1, 2]
    assert trace.sequence.tolist() == [0, 0, 0, 1]
    assert trace.num_experts == 16
    assert trace.metadata == {"top_k": 2, "model": "some-moe", "expert_bytes": 4096}


def test_token_pairs_keep_layers_and_order(tmp_path: Path) -> None:
    """A token that lacks a layer has padding there; the highest id says how many."""
    path = lines(tmp_path / "a.jsonl", [[3, 1], [3, 0], [5, 2], [5, 7]], [[5, 4], [5, 6]])
    trace = load_any(path)

    assert trace.layers.tolist() == [3, 5]
    assert trace.experts.tolist() == [[[1, 0], [2, 7]], [[-1, -1], [4, 6]]]
    assert trace.num_experts == 8
    assert trace.metadata["num_experts_inferred"] is True
    assert "num_experts_inferred" not in load_any(path, num_experts=9).metadata


def test_llama_topk_has_passes_and_short_last_layers(tmp_path: Path) -> None:
    """The last layer of a prompt is that of its last token; then a decoded one."""
    path = lines(
        tmp_path / "a.jsonl",
        {"l": 0, "t": 2, "e": [[0, 1], [2, 3]]},
        {"l": 1, "t": 1, "e": [[4, 5]]},
        {"l": 0, "t": 1, "e": [[6, 7]]},
        {"l": 1, "t": 1, "e": [[1, 0]]},
    )
    trace = load_any(path, num_experts=8)

    assert detect_format(path) == "llama-topk"
    assert trace.experts[:, 0].tolist() == [[0, 1], [2, 3], [6, 7]]
    assert trace.experts[:, 1].tolist() == [[-1, -1], [4, 5], [1, 0]]
    assert trace.phase.tolist() == [0, 0, 1]
    assert trace.step.tolist() == [0, 0, 1]
    assert len(trace.whole_tokens()) == 2


def test_llama_topk_also_comes_token_by_token(tmp_path: Path) -> None:
    """Records of one token each, a layer's tokens in a row: the same trace."""
    records = [
        {"layer": 0, "token_index": 0, "experts": [0, 1]},
        {"layer": 0, "token_index": 1, "experts": [2, 3]},
        {"layer": 1, "token_index": 0, "experts": [4, 5]},
        {"layer": 1, "token_index": 1, "experts": [6, 7]},
        {"layer": 0, "token_index": 2, "experts": [1, 0]},
        {"layer": 1, "token_index": 2, "experts": [3, 2]},
    ]
    trace = load_any(lines(tmp_path / "a.jsonl", *records))

    assert trace.experts[:, 1].tolist() == [[4, 5], [6, 7], [3, 2]]
    assert trace.step.tolist() == [0, 0, 1]


def test_routed_experts_come_as_arrays(tmp_path: Path) -> None:
    """.npy and .npz; unsigned ids; what was not captured is padding, empty layers go."""
    array = np.array([[[0, 0], [3, 1]], [[0, 0], [2, 0]], [[0, 0], [0, 0]]], np.uint8)
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "b.npz", routed_experts=array[1:], prompt_routed_experts=array[:1])
    for name in ("a.npy", "b.npz"):
        trace = load_any(tmp_path / name, num_experts=4)
        assert trace.experts.tolist() == [[[3, 1]], [[2, 0]], [[-1, -1]]]
        assert trace.layers.tolist() == [1]
    assert trace.phase.tolist() == [0, 1, 1]
    direct = from_routed_experts(array, num_experts=4, prompt_tokens=2, model="m")
    assert (direct.phase.tolist(), direct.step.tolist()) == ([0, 0, 1], [0, 0, 1])
    assert direct.experts.tolist() == trace.experts.tolist()


def test_routed_experts_come_in_responses(tmp_path: Path) -> None:
    """Lists, vLLM's base64 of .npy, SGLang's base64 of int32: a sequence per answer."""
    ids = random_trace(0, num_tokens=5, num_layers=2).experts.astype(np.int32)
    bare = base64.b64encode(ids.astype("<i4").tobytes()).decode()
    whole = base64.b64encode(npy(ids)).decode()
    path = lines(
        tmp_path / "a.jsonl",
        {"routed_experts": ids[2:].tolist(), "prompt_routed_experts": ids[:2].tolist()},
        {"choices": [{"routed_experts": whole}] * 2, "usage": {"prompt_tokens": 2}},
        {"meta_info": {"routed_experts": bare, "prompt_tokens": 2}},
    )
    trace = load_any(path, num_experts=8, num_layers=2, top_k=2)

    assert detect_format(path) == "routed-experts"
    for number in range(4):
        part = trace[5 * number : 5 * number + 5]
        assert np.array_equal(part.experts, ids)
        assert part.phase.tolist() == [0, 0, 1, 1, 1]
        assert (part.step - part.step[0]).tolist() == [0, 0, 1, 2, 3]
        assert set(part.sequence.tolist()) == {number}


def test_router_logits_give_the_largest_and_the_lower_id() -> None:
    """Per layer and forward call; tensors too, whatever their dtype."""
    torch = pytest.importorskip("torch")
    logits = np.array([[1.0, 3.0, 3.0, 0.0], [0.0, 0.5, 2.0, 2.0]])
    for given in (logits, logits.astype(np.float16), torch.tensor(logits, dtype=torch.bfloat16)):
        trace = from_router_logits((given, -given), 2, model="m")
        assert trace.experts.tolist() == [[[1, 2], [3, 0]], [[2, 3], [0, 1]]]
        assert (trace.phase.tolist(), trace.step.tolist()) == ([0, 0], [0, 0])
        calls = from_router_logits([(given, given), (given[:1], given[:1])], 1)
        assert calls.experts[:, 0, 0].tolist() == [1, 2, 1]
        assert (calls.phase.tolist(), calls.step.tolist()) == ([0, 0, 1], [0, 0, 1])
    batch = from_router_logits((logits,), 1, batch_size=2)
    assert (batch.sequence.tolist(), batch.phase.tolist()) == ([0, 1], [1, 1])


@pytest.mark.parametrize(
    ("logits", "top_k", "message"),
    [
        ([], 1, "no router logits"),
        ([np.ones((2, 3)), np.ones((2, 4))], 1, "alike in all"),
        ([np.ones(3)], 1, "must be \\[tokens, experts\\]"),
        ([np.full((2, 3), np.nan)], 1, "NaN"),
        ([np.ones((2, 3))], 4, "top-4 of 3"),
        ([np.array([["a"]])], 1, "must be numbers"),
        ([[np.ones((2, 3))], [np.ones((1, 4))]], 1, "top-1 of 4 experts \\(and of 3 before\\)"),
    ],
)
def test_wrong_logits_say_what_is_wrong(logits: Any, top_k: int, message: str) -> None:
    """Shapes that disagree, NaN, too many choices."""
    with pytest.raises(ConfigError, match=message):
        from_router_logits(logits, top_k)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no trace of a known form"),
        ("hello\n", "no trace of a known form"),
        ("[[0, 1]]\n[[0, 1\n", "line 2: is not JSON"),
        ("[[0, 1]]\n\n[[0, 1, 2]]\n", "line 3: must be a list of"),
        ("[[0, 1]]\n{}\n", "line 2: must be a list of"),
        ("[[0, 1.5]]\n", r"line 1: expert must be a whole number, got 1\.5"),
        ("[[0, NaN]]\n", "line 1: expert must be a whole number, got nan"),
        ("[[-1, 0]]\n", r"line 1: layer -1 is not in \[0, "),
        ("[[0, -1]]\n", "line 1: expert -1 is not in"),
        (f"[[0, {10**30}]]\n", "line 1: expert a number beyond 64 bits is not in"),
        ("[[0, true]]\n", "whole number, got True"),
        ("[[0, 3], [0, 3]]\n", "expert 3 is there twice"),
        ("[" * 50_000, "line 1: is not JSON"),
        ("[]\n[]\n", "has no routing in it"),
        ('{"l": 0, "e": [[0, 1], 3]}\n', "line 1: experts must be a list per token"),
        ('{"l": 0, "e": "abc"}\n', "line 1: experts must be a list"),
        ('{"l": 0, "t": 3, "e": [[0]]}\n', "line 1: says 3 tokens, has 1"),
        ('{"l": 0, "x": [[0]]}\n', "line 1: has no experts"),
        ('{"l": "0", "e": [[0]]}\n', "line 1: layer must be a whole number"),
        ('{"a": 1}\n', "line 1: has no 'routed_experts'"),
        ('{"routed_experts": [[1, 2]]}\n', "line 1: routed_experts must be whole numbers"),
        ('{"routed_experts": [[[1], [1, 2]]]}\n', r"line 1: routed_experts is not \[tokens"),
        ('{"routed_experts": "???"}\n', "line 1: routed_experts is not base64"),
        ('{"routed_experts": "AAAA"}\n', "line 1: .* say num_layers and top_k"),
        ('{"routed_experts": [[[1.5]]]}\n', "line 1: routed_experts must be whole numbers"),
        ('{"routed_experts": 7}\n', "line 1: routed_experts must be a list or base64"),
        (CSV.replace("slot", "place"), "line 4: has no column 'slot'"),
        (CSV.replace("1,0,5,0.6", "1,0,five,0.6"), "line 5: .* is not as the columns say"),
        (CSV.replace("0,0,0,0,1,1,3,0.4", "0,0,0"), "line 6: .* is not as the columns say"),
        (CSV.replace("0,0,0,0,1,1,3,0.4", "0,0,0,0,1,2,3,0.4"), "line 6: slot 2 follows 1"),
        (CSV.replace("0,0,0,0,1,1,3", "0,0,5,0,1,1,3"), "line 6: phase must be 0 or 1, got 5"),
        (CSV.replace(",5,0.6", ",16,0.6"), r"expert 16 is not in \[0, 16\)"),
        (CSV.replace(",5,0.6", ",-5,0.6"), "line 5: expert -5 is not in"),
    ],
)
def test_a_damaged_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    """A FormatError with file and line."""
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises(FormatError, match=message) as caught:
        load_any(path)
    assert "bad.txt" in str(caught.value)


def test_uneven_rows_do_not_take_all_memory(tmp_path: Path) -> None:
    """One row of many choices and many of one would be terabytes as an array."""
    wide = [[0, expert] for expert in range(60_000)]
    path = lines(tmp_path / "a.jsonl", wide, *[[[0, 1]]] * 20_000)
    with pytest.raises(FormatError, match="too much for a file of this size"):
        load_any(path)


@pytest.mark.parametrize("routed", [1, 15, 16])
@pytest.mark.parametrize(
    ("dtype", "kind"), [("u1", "npz"), ("i2", "npy"), (">u4", "npz"), ("i8", "npy")]
)
def test_ids_cost_at_most_twice_their_bytes(
    dtype: str, kind: str, routed: int, tmp_path: Path
) -> None:
    """16 MiB of ids, while they are read and made a trace, with and without layers to leave out."""
    ids = np.tile(np.arange(8, dtype=dtype), 2**21 // np.dtype(dtype).itemsize).reshape(-1, 16, 8)
    ids[:, routed:] = 0
    path = tmp_path / f"a.{kind}"
    if kind == "npz":
        np.savez(path, routed_experts=ids)
    else:
        np.save(path, ids)

    tracemalloc.start()
    trace = load_any(path, num_experts=16)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert np.array_equal(trace.experts, ids[:, :routed])
    assert peak <= 2 * ids.nbytes + 6 * 2**20


def test_what_ids_become_counts_for_how_many_there_may_be(tmp_path: Path) -> None:
    """40 MiB of bytes in 40 KB are 80 MiB in a trace: more than a file of that size may have."""
    path = tmp_path / "a.npz"
    np.savez_compressed(path, routed_experts=np.zeros((2**20, 5, 8), np.uint8))

    assert path.stat().st_size < 2**18
    with pytest.raises(FormatError, match=r"takes 96\.0 MiB, more than the 64\.0 MiB"):
        load_any(path)


def test_ids_beyond_32_bits_are_no_experts(tmp_path: Path) -> None:
    """They are refused, and never become others."""
    for number, value in enumerate((2**31, -(2**31) - 1, 2**40 + 1, 2**64 - 1)):
        array = np.array([[[value, 1]]], np.uint64 if value > 2**63 else np.int64)
        path = tmp_path / f"{number}.npy"
        np.save(path, array)
        with pytest.raises(FormatError, match=f"has {value}, which is no expert"):
            load_any(path)
        with pytest.raises(ConfigError, match=f"has {value}, which is no expert"):
            from_routed_experts(array, num_experts=8)


def test_arrays_in_fortran_order_keep_their_places(tmp_path: Path) -> None:
    """Read piece by piece into C's order."""
    ids = np.random.default_rng(0).integers(0, 64, (30_001, 5, 3)).argsort(axis=2)
    np.save(tmp_path / "a.npy", np.asfortranarray(ids))

    assert np.array_equal(load_any(tmp_path / "a.npy").experts, ids)


def test_responses_of_different_widths_and_prompts_are_joined(tmp_path: Path) -> None:
    """Small ids and large ones; the prompts' rows are one step each."""
    path = lines(
        tmp_path / "a.jsonl",
        {"prompt_routed_experts": [[[1, 2]], [[3, 4]]], "routed_experts": [[[5, 6]]]},
        {"routed_experts": [[[40_000, 7]], [[8, 9]], [[1, 0]]], "usage": {"prompt_tokens": 2}},
        {"routed_experts": []},
    )
    with pytest.raises(FormatError, match="must be whole numbers"):
        load_any(path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))

    trace = load_any(path)

    assert trace.experts[:, 0].tolist() == [[1, 2], [3, 4], [5, 6], [40_000, 7], [8, 9], [1, 0]]
    assert trace.phase.tolist() == [0, 0, 1, 0, 0, 1]
    assert trace.step.tolist() == [0, 0, 1, 3, 3, 4]
    assert trace.sequence.tolist() == [0, 0, 0, 1, 1, 1]


def test_binary_files_that_lie_are_format_errors(tmp_path: Path) -> None:
    """Pickles, floats, wrong shapes, text that is none, an .npz of something else."""
    np.save(tmp_path / "a.npy", np.array([[[object()]]]), allow_pickle=True)
    np.save(tmp_path / "b.npy", np.ones((2, 2, 2)))
    np.save(tmp_path / "c.npy", np.ones((2, 2), int))
    np.savez(tmp_path / "d.npz", something=np.ones(3))
    (tmp_path / "e.txt").write_bytes(b"[[0, 1]]\n\xff\xfe\n")
    (tmp_path / "f.npz").write_bytes(b"PK\x03\x04nothing")
    messages = ("pickles", "integers", "integers", "no array", "line 2 is not UTF-8", r"no \.npz")
    for path, message in zip(sorted(tmp_path.iterdir()), messages, strict=True):
        with pytest.raises(FormatError, match=message):
            load_any(path)
    with pytest.raises(StoreError, match="No such file"):
        load_any(tmp_path / "none")
    with pytest.raises(ConfigError, match="format 'csv' is not one of auto, npz"):
        load_any(tmp_path / "e.txt", format="csv")


def test_npz_is_one_of_the_forms_and_takes_metadata(tmp_path: Path) -> None:
    """What is said wins over what is in the file."""
    random_trace(0).save(tmp_path / "a.npz")
    trace = load_any(tmp_path / "a.npz", license="MIT", model="other")

    assert trace.digest == random_trace(0).digest
    assert (trace.metadata["license"], trace.metadata["model"]) == ("MIT", "other")
    assert set(FORMATS) == {"npz", "token-pairs", "llama-topk", "route-csv", "routed-experts"}


def test_progress_is_told_while_lines_are_read(tmp_path: Path) -> None:
    """Bytes so far and all of them, never more."""
    told: list[tuple[int, int]] = []
    path = lines(tmp_path / "a.jsonl", *[[[0, 1]]] * 9000)
    load_any(path, progress=lambda done, total: told.append((done, total)))

    size = path.stat().st_size
    assert len(told) == 2
    assert all(0 < done < total == size for done, total in told)


def test_a_file_of_our_own_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another time only if it is to be another trace."""
    random_trace(3).save(tmp_path / "one.npz")
    checked: list[int] = []
    monkeypatch.setattr(
        "moecache.traces.trace.check_ids", lambda _, num_experts: checked.append(num_experts)
    )

    assert load_any(tmp_path / "one.npz").num_experts == 8
    assert checked == [8]
    named = load_any(tmp_path / "one.npz", num_experts=9, model="other")
    assert (named.num_experts, named.metadata["model"], checked) == (9, "other", [8, 8, 9])
