"""Texts of a GGUF file's model that has states, which belong to all tokens before them."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache.decoding.files.continuing import open_prefixes
from moecache.decoding.files.model import TextModel
from moecache.decoding.files.opening import open_text_model
from moecache.decoding.files.recipes import FileModel
from moecache.decoding.program_model import PROMPT_TOKENS
from moecache.decoding.states_cache import STATE_TOKENS
from moecache.errors import StoreError
from moecache.sizing.headroom import Headroom, headroom, kv_bytes_per_token, states_per_text
from moecache.stores import GgufStore, open_store
from tests.helpers.gguf_texts import write_quantized
from tests.test_gguf_text_model import run_text, text_after

pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

IDS = np.random.default_rng(0).integers(3, 90, 150).tolist()


@pytest.fixture(name="file", scope="module", params=["qwen35moe", "nemotron_h_moe", "lfm2moe"])
def _file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a quantized file of a model whose layers hold states of one kind or the other."""
    path = tmp_path_factory.mktemp("states") / "model.gguf"
    return write_quantized(path, request.param, 1024)


@pytest.fixture(name="model")
def _model(file: Path) -> Iterator[TextModel]:
    """Return its model with a few slots."""
    with open_text_model(file, "50%") as model:
        yield model


def test_a_text_goes_on_from_the_last_states_that_are_known(model: TextModel) -> None:
    """Those at the end of a prompt's last page, or of an answer's."""
    rng = np.random.default_rng(1)
    prefixes = open_prefixes(model, 2**26)
    prompt, known = IDS, 0
    for turn in range(4):
        wanted, _ = run_text(model, prompt, 90)
        assert run_text(model, prompt, 90, prefixes) == (wanted, known)
        # The last token of an answer is drawn, and not read.
        known = (len(prompt) + len(wanted) - 1) // STATE_TOKENS * STATE_TOKENS
        prompt = prompt + wanted + rng.integers(3, 90, 9 + turn).tolist()
    # Another end: what is left out of an answer is what was thought, say.
    other = [*IDS, 7, 8, 9]
    assert run_text(model, other, 5, prefixes) == (run_text(model, other, 5)[0], 128)
    # Pages that have no states are none to go on from.
    other = [*IDS[:100], 7, 8, 9]
    assert run_text(model, other, 5, prefixes) == (run_text(model, other, 5)[0], 0)
    # Then they have them.
    assert run_text(model, [*IDS[:66], 8, 9], 5, prefixes)[1] == 64


def test_states_are_found_by_another_process(model: TextModel, file: Path, tmp_path: Path) -> None:
    """In files."""
    wanted, _ = run_text(model, IDS, 6)
    # A page that came without states has them where a text of its own has ended there.
    shorter = [*IDS[:66], 8, 9]
    for known, short in ((0, 0), (128, 64), (128, 64)):
        with (
            open_text_model(file, "50%") as opened,
            contextlib.closing(
                open_prefixes(opened, 2**24, directory=tmp_path, max_disk_bytes=2**24)
            ) as prefixes,
        ):
            assert run_text(opened, IDS, 6, prefixes) == (wanted, known)
            assert run_text(opened, shorter, 2, prefixes)[1] == short
            assert prefixes.stats().hit_tokens == known + short


def test_a_read_that_fails_leaves_the_states_as_they_were(file: Path, tmp_path: Path) -> None:
    """In the middle of a token and of a prompt, whose first layers have theirs already."""
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    with open_text_model(copy, slots=1, prefetch="off", prefault="off") as model:
        wanted, last = text_after(model, IDS, 3)
        cache = model.new_cache()
        logits = model.read(IDS[:60], cache)
        size = copy.stat().st_size
        os.truncate(copy, size // 2)
        for ids in ([5], IDS[60:]):
            with pytest.raises(StoreError):
                model.read(ids, cache)
        copy.write_bytes(file.read_bytes())
        assert cache.length == 60
        logits = model.read(IDS[60:], cache)
        out = []
        for _ in range(3):
            out.append(int(logits.argmax()))
            logits = model.read(out[-1:], cache)
        assert out == wanted
        assert np.array_equal(logits, last)


def test_an_interrupt_leaves_the_states_where_they_were(file: Path) -> None:
    """Wherever it comes in a prompt: what is read again has the same bits."""

    class EndError(Exception):
        pass

    def end(*_: object) -> None:
        raise EndError

    with open_text_model(file, "30%", prefetch="off") as model:
        whole = model.new_cache()
        model.read(IDS[:40], whole)
        wanted = model.read(IDS[40:], whole)
        cache = model.new_cache()
        model.read(IDS[:40], cache)
        before, num_ended = signal.signal(signal.SIGALRM, end), 0
        try:
            for microseconds in range(100, 4000, 300):
                try:
                    signal.setitimer(signal.ITIMER_REAL, microseconds / 1e6)
                    logits = model.read(IDS[40:], cache)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    time.sleep(0.001)
                    break
                except EndError:
                    num_ended += 1
                    if cache.length != 40:  # it came after the last layer
                        break
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert num_ended
        if cache.length == 40:
            logits = model.read(IDS[40:], cache)
            assert np.array_equal(logits, wanted)
        assert np.array_equal(model.read([5], cache), model.read([5], whole))


def test_texts_are_read_together(model: TextModel) -> None:
    """Each with its own states: the bits that it has alone; pages are those of either way."""
    parts = [IDS[:70], IDS[70:71], IDS[71:140]]
    alone, caches = [], [model.new_cache() for _ in parts]
    for part in parts:
        own = model.new_cache()
        alone.append([model.read(part, own), model.read([5], own)])
        pages = own.page(0, 64) if len(part) > 64 else ()
        alone[-1].append([each.tobytes() for layer in pages for each in layer])
    for step in range(2):
        found = model.read_together(parts if not step else [[5]] * 3, caches)
        assert all(np.array_equal(one, own[step]) for one, own in zip(found, alone, strict=True))
    for cache, own in zip(caches, alone, strict=True):
        pages = cache.page(0, 64) if cache.length > 64 else ()
        assert [each.tobytes() for layer in pages for each in layer] == own[2]


def test_pages_of_another_shape_are_left_out(model: TextModel) -> None:
    """With those behind them, and those behind the last that has states."""
    cache = model.new_cache()
    model.read(IDS, cache)
    first, second = cache.page(0, 64), cache.page(64, 128)
    assert len(first) < len(second)
    assert model.new_cache([first, second]).length == 128
    assert model.new_cache([first]).length == 0
    keys, states = len(first), second[len(first) :]
    for other in (
        states[:-1],
        tuple((seen, held[..., :-1]) for seen, held in states),
        tuple((seen[..., :-1], held) for seen, held in states),
        tuple((seen, held.astype(np.float16)) for seen, held in states),
    ):
        assert model.new_cache([first, (*second[:keys], *other)]).length == 0


def test_a_plan_leaves_room_for_keys_of_some_layers_and_states_of_the_others(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the file says of itself, and what is known as its model is opened."""
    rooms = []

    def noted(*args: Any, **named: Any) -> Headroom:
        rooms.append(headroom(*args, **named))
        return rooms[-1]

    monkeypatch.setattr("moecache.runtime.plan.headroom", noted)
    with open_text_model(file) as model:
        cache = model.new_cache()
        growth = cache.growth_bytes(1) - 256 * model.bytes_per_token
    with open_store(file) as store:
        assert isinstance(store, GgufStore)
        said = FileModel(store)
        assert kv_bytes_per_token(store.config) == said.bytes_per_token
        assert said.bytes_per_token < len(store.config["layer_types"]) * 2 * 2 * 2 * 16
    (room,) = rooms
    assert growth == said.state_bytes > 0
    # It counts a row of convolutions more, and what heads hold is small here.
    assert growth <= states_per_text(store.config) < 2 * growth
    assert room.kv_cache_bytes == room.context_tokens * said.bytes_per_token
    prompts = said.prompt_bytes(PROMPT_TOKENS)
    assert room.trunk_bytes == said.trunk_bytes + prompts
    assert room.state_bytes == growth


@pytest.mark.parametrize("name", ["granitehybrid", "lfm2moe"])
def test_a_model_without_states_goes_on_from_any_page(tmp_path: Path, name: str) -> None:
    """Of families that have some: where all layers have keys and values."""
    layers = {"layer_types": ["full_attention"] * 3}
    path = write_quantized(tmp_path / "model.gguf", name, 1024, **layers)
    with open_text_model(path, "50%") as model:
        prefixes = open_prefixes(model, 2**26)
        wanted, known = run_text(model, IDS * 2, 4, prefixes)
        assert not known
        found, known = run_text(model, [*IDS, *IDS], 4, prefixes)
        assert (found, known > 200) == (wanted, True)
