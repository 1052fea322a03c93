"""Traces as lines of text: JSON lines and CSV, read line by line."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moecache.errors import FormatError, StoreError
from moecache.study._cells import Cells, whole_number
from moecache.traces.files import allowed_bytes
from moecache.traces.trace import DECODE, PREFILL, Trace

# Called with the bytes read so far, and all of them.
Progress = Callable[[int, int], object]

MAX_LINE_BYTES = 64 * 2**20
_PROGRESS_LINES = 4096

# Names that dumps of ffn_moe_topk give to a layer, to a token, and to the ids.
_LAYER = ("l", "layer", "layer_id", "il")
_TOKEN = ("token_index", "token_idx", "token", "pos")
_IDS = ("e", "experts", "topk_experts", "topk_ids", "expert_ids", "ids")
_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert")


def load_token_pairs(
    path: str | os.PathLike[str],
    *,
    num_experts: int | None = None,
    progress: Progress | None = None,
    **metadata: Any,
) -> Trace:
    """Read JSON lines, a token each: a list of [layer, expert], in the layers' order.

    The simulator's form of nvmoe. Phases and sequences are not known: all is decode.
    See `load_any` for the parameters and errors.
    """
    path = Path(path)
    cells = Cells(str(path))
    for row, (where, value) in enumerate(json_lines(path, progress)):
        if not isinstance(value, list):
            raise FormatError(f"{where}: must be a list of [layer, expert]")
        by_layer: dict[int, list[int]] = {}
        for pair in value:
            if not isinstance(pair, list) or len(pair) != 2:
                raise FormatError(f"{where}: must be a list of [layer, expert]")
            layer = whole_number(pair[0], "layer", where)
            by_layer.setdefault(layer, []).append(whole_number(pair[1], "expert", where))
        cells.num_rows = row + 1
        for layer, ids in by_layer.items():
            cells.add(row, layer, ids)
    return finish(path, cells, num_experts=num_experts, metadata=metadata)


def load_llama_topk(
    path: str | os.PathLike[str],
    *,
    num_experts: int | None = None,
    progress: Progress | None = None,
    **metadata: Any,
) -> Trace:
    """Read JSON lines, a layer of one llama.cpp evaluation each: its ffn_moe_topk.

    A line is an object with the layer (`l`, `layer`, `layer_id`, `il`) and the ids, a
    list per token (`e`, `experts`, `topk_experts`, `topk_ids`, `expert_ids`, `ids`), or
    those of one token, whose number may be given (`token_index`, `token`, `pos`). A
    new pass begins where the layer's number does not increase. llama.cpp computes the
    last layer of a prompt only for the tokens whose output it needs: a layer with
    fewer rows than its pass is that of the last ones. See `load_any` for the rest.
    """
    path = Path(path)
    passes = _Passes(path)
    for where, value in json_lines(path, progress):
        if not isinstance(value, dict):
            raise FormatError(f"{where}: must be an object with a layer and its experts")
        layer = whole_number(_first(value, _LAYER, "layer", where), "layer", where)
        ids = _first(value, _IDS, "experts", where)
        if not isinstance(ids, list):
            raise FormatError(f"{where}: experts must be a list")
        rows = ids if ids and isinstance(ids[0], list) else [ids]
        checked = []
        for row in rows:
            if not isinstance(row, list):
                raise FormatError(f"{where}: experts must be a list per token")
            checked.append([whole_number(expert, "expert", where, least=-1) for expert in row])
        count = value.get("t", len(checked))
        if count != len(checked):
            raise FormatError(f"{where}: says {count!r} tokens, has {len(checked)}")
        token = next((value[name] for name in _TOKEN if name in value), None)
        if token is not None:
            whole_number(token, "token", where)
        passes.add(layer, checked, token if len(checked) == 1 else None)
    passes.end()
    return finish(
        path,
        passes.cells,
        num_experts=num_experts,
        phase=np.asarray(passes.phase, np.uint8),
        step=np.asarray(passes.step, np.int32),
        metadata=metadata,
    )


def load_route_csv(
    path: str | os.PathLike[str],
    *,
    num_experts: int | None = None,
    progress: Progress | None = None,
    **metadata: Any,
) -> Trace:
    """Read the route CSV of BigMoeOnEdge: a row per turn, phase, step, layer and slot.

    Columns are found by their names. Comments at the top say the model, the experts
    per layer and their bytes. A turn's prompt is one step. See `load_any` for the rest.
    """
    path = Path(path)
    said: dict[str, str] = {}
    columns: list[int] = []
    tokens: dict[tuple[int, int, int], int] = {}
    chosen: dict[tuple[int, int], list[int]] = {}
    for where, line in _lines(path, progress):
        if line.startswith("#"):
            for word in line[1:].split():
                name, _, text = word.partition("=")
                said[name] = text
            continue
        fields = line.split(",")
        if not columns:
            missing = [name for name in _COLUMNS if name not in fields]
            if missing:
                raise FormatError(f"{where}: has no column {missing[0]!r}; is it a route trace?")
            columns = [fields.index(name) for name in _COLUMNS]
            continue
        try:
            numbers = [int(fields[column]) for column in columns]
        except (ValueError, IndexError) as error:
            raise FormatError(f"{where}: {line[:60]!r} is not as the columns say") from error
        turn, phase, step, layer, slot, expert = (
            whole_number(number, name, where)
            for number, name in zip(numbers, _COLUMNS, strict=True)
        )
        if phase > 1:
            raise FormatError(f"{where}: phase must be 0 or 1, got {phase}")
        row = tokens.setdefault((turn, phase, step), len(tokens))
        ids = chosen.setdefault((row, layer), [])
        if slot != len(ids):
            raise FormatError(f"{where}: slot {slot} follows {len(ids)} of the same cell")
        ids.append(expert)
    cells = Cells(str(path))
    for (row, layer), ids in chosen.items():
        cells.add(row, layer, ids)
    keys = np.array(list(tokens), np.int64).reshape(-1, 3)
    # A turn's prompt is evaluated at once, decode token by token.
    together = (np.diff(keys[:, 0], prepend=-1) == 0) & (keys[:, 1] == PREFILL)
    together[1:] &= keys[:-1, 1] == PREFILL
    known = {"model": Path(said.get("model", "")).name.removesuffix(".gguf")}
    if said.get("expert_bytes", "").isdecimal():
        known["expert_bytes"] = int(said["expert_bytes"][:18])  # type: ignore[assignment]
    if num_experts is None and said.get("n_expert", "").isdecimal():
        num_experts = int(said["n_expert"][:9])
    return finish(
        path,
        cells,
        num_experts=num_experts,
        phase=keys[:, 1],
        sequence=np.unique(keys[:, 0], return_inverse=True)[1],
        step=np.cumsum(~together) - 1,
        metadata={**{name: value for name, value in known.items() if value}, **metadata},
    )


def finish(
    path: Path,
    cells: Cells,
    *,
    num_experts: int | None,
    metadata: dict[str, Any],
    **vectors: np.ndarray,
) -> Trace:
    """Return the trace of all cells; without `num_experts`, the highest id says it."""
    experts, layers = cells.dense(allowed_bytes(path.stat().st_size))
    if num_experts is None:
        num_experts = max(int(experts.max()) + 1, experts.shape[2])
        metadata = {"num_experts_inferred": True, **metadata}
    try:
        return Trace(experts, num_experts=num_experts, layers=layers, **vectors, **metadata)
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from error


class _Passes:
    """Layers of evaluations, put together to passes."""

    def __init__(self, path: Path) -> None:
        self.cells = Cells(str(path))
        self.phase: list[int] = []
        self.step: list[int] = []
        self._first = 0
        self._num_steps = 0
        self._blocks: dict[int, list[list[int]]] = {}
        self._last: tuple[int, int | None] = (-1, None)

    def add(self, layer: int, rows: list[list[int]], token: int | None) -> None:
        last, last_token = self._last
        self._last = (layer, token)
        if token is not None and last_token is not None and layer == last and token > last_token:
            # One more token of the same layer: a prompt that is written token by token.
            self._blocks[layer] += rows
            return
        if layer <= last:
            self.end()
        self._blocks[layer] = rows

    def end(self) -> None:
        if not self._blocks:
            return
        count = max(map(len, self._blocks.values()))
        for layer, rows in self._blocks.items():
            start = self._first + count - len(rows)
            for row, ids in enumerate(rows, start):
                self.cells.add(row, layer, ids)
        self._first += count
        self.phase += [DECODE if count == 1 else PREFILL] * count
        self.step += [self._num_steps] * count
        self.cells.num_rows = self._first
        self._num_steps += 1
        self._blocks = {}


def _lines(path: Path, progress: Progress | None) -> Iterator[tuple[str, str]]:
    """Yield (file and line number, line) of the lines that are not empty."""
    try:
        with path.open("rb") as file:
            size, done = path.stat().st_size, 0
            for number in range(1, 2**62):
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    break
                done += len(line)
                if len(line) > MAX_LINE_BYTES:
                    raise FormatError(f"{path}: line {number} is longer than {MAX_LINE_BYTES} B")
                if progress is not None and number % _PROGRESS_LINES == 0:
                    progress(done, size)
                try:
                    # Editors of other systems begin a file with a byte order mark.
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    raise FormatError(f"{path}: line {number} is not UTF-8 text") from error
                if text:
                    yield f"{path}: line {number}", text
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}") from error


def json_lines(path: Path, progress: Progress | None) -> Iterator[tuple[str, Any]]:
    for where, line in _lines(path, progress):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{where}: is not JSON: {error}") from error
        yield where, value


def _first(value: dict[str, Any], names: tuple[str, ...], what: str, where: str) -> Any:
    for name in names:
        if name in value:
            return value[name]
    raise FormatError(f"{where}: has no {what} (any of {', '.join(names)})")
