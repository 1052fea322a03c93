"""TextModel: a GGUF file's model without torch, beside transformers' own."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache import kernels
from moecache.decoding.files.continuing import continue_text, open_prefixes
from moecache.decoding.files.model import TextModel
from moecache.decoding.files.opening import open_text_model
from moecache.decoding.prefixes import PrefixCache
from moecache.decoding.program_model import PROMPT_TOKENS
from moecache.decoding.sampler import Sampler, Sampling
from moecache.decoding.streams import Stopped, TokenTimes
from moecache.errors import ConfigError, MoeCacheError, StoreError
from tests.helpers.gguf_texts import write_quantized
from tests.helpers.gguf_tokenizers import byte_level

pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

IDS = np.random.default_rng(0).integers(3, 90, 40).tolist()


@pytest.fixture(name="file", scope="module")
def _file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a quantized file of Qwen3-MoE."""
    return write_quantized(tmp_path_factory.mktemp("file") / "model.gguf", "qwen3moe")


@pytest.fixture(name="model")
def _model(file: Path) -> Iterator[TextModel]:
    """Return its model with a few slots."""
    with open_text_model(file, "50%") as model:
        yield model


def text_after(model: TextModel, ids: list[int], num: int) -> tuple[list[int], np.ndarray]:
    """Return the likeliest tokens after others, and the last logits."""
    cache, out = model.new_cache(), []
    logits = model.read(ids, cache)
    for _ in range(num):
        out.append(int(logits.argmax()))
        logits = model.read(out[-1:], cache)
    return out, logits


def test_bits_depend_neither_on_cuts_nor_slots_nor_threads(file: Path) -> None:
    """Nor on how experts are read, or whether the next layer's are foreseen."""
    wanted = None
    for options in (
        {"memory": "100%"},
        {"memory": "25%", "prefetch": "off"},
        {"memory": "25%", "prefetch": "router", "read": "direct"},
        {"slots": 1, "prefetch": "auto"},
    ):
        with open_text_model(file, **options) as model:
            for threads, cut in ((1, 40), (2, 1), (2, 17), (1, 23)):
                kernels.use_threads(threads)
                cache = model.new_cache()
                for start in range(0, len(IDS), cut):
                    logits = model.read(IDS[start : start + cut], cache)
                wanted = logits if wanted is None else wanted
                assert np.array_equal(logits, wanted)


def test_a_prompt_longer_than_a_part_is_read_in_parts(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits; who asks is told how far it is."""
    assert PROMPT_TOKENS == 512
    wanted = model.read(IDS, model.new_cache())
    monkeypatch.setattr("moecache.decoding.program_model.PROMPT_TOKENS", 18)
    told: list[int] = []
    assert np.array_equal(model.read(IDS, model.new_cache(), told.append), wanted)
    assert told == sorted(told)
    assert {18, 36} < set(told)
    assert told[-1] == 40


def test_two_texts_do_not_disturb_each_other(model: TextModel) -> None:
    """Each has a cache of its own, which grows."""
    alone, _ = text_after(model, IDS[:5], 300)
    first, second = model.new_cache(), model.new_cache()
    logits, others = model.read(IDS[:5], first), model.read(IDS[5:30], second)
    out = []
    for _ in range(300):
        out.append(int(logits.argmax()))
        logits = model.read(out[-1:], first)
        others = model.read([int(others.argmax())], second)
    assert out == alone
    assert first.length == 305


def test_what_cannot_be_read_is_refused_and_nothing_changes(model: TextModel) -> None:
    """The text goes on behind what it had."""
    wanted, _ = text_after(model, IDS[:9], 3)
    cache = model.new_cache()
    logits = model.read(IDS[:9], cache)
    with pytest.raises(ConfigError, match="a token at least"):
        model.read([], cache)
    for token in (-1, model.vocabulary):
        with pytest.raises(IndexError, match="is of another tokenizer"):
            model.read([3, token], cache)
    for wrong in ([1.5], ["a"], [[1]]):
        with pytest.raises(TypeError):
            model.read(wrong, cache)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="more than the model's"):
        model.read([3] * model.context, cache)
    assert np.array_equal(model.read(np.array(IDS[:9]), model.new_cache()), logits)
    out = []
    for _ in range(3):
        out.append(int(logits.argmax()))
        logits = model.read(out[-1:], cache)
    assert out == wanted


def test_a_read_that_fails_leaves_the_text_where_it_was(file: Path, tmp_path: Path) -> None:
    """A file that is cut short and comes back."""
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    with open_text_model(copy, slots=1, prefetch="off", prefault="off") as model:
        wanted, _ = text_after(model, IDS, 3)
        cache = model.new_cache()
        logits = model.read(IDS, cache)
        size = copy.stat().st_size
        os.truncate(copy, size // 4)
        with pytest.raises(StoreError):
            model.read([int(logits.argmax())], cache)
        with pytest.raises(StoreError):
            model.read(IDS, model.new_cache())
        copy.write_bytes(file.read_bytes())
        assert cache.length == len(IDS)
        out = []
        for _ in range(3):
            out.append(int(logits.argmax()))
            logits = model.read(out[-1:], cache)
        assert out == wanted
    with pytest.raises(MoeCacheError, match="closed"):
        model.read(IDS, model.new_cache())


def test_options_that_are_its_own_are_refused(file: Path) -> None:
    """A device, say: these models are computed in RAM."""
    with pytest.raises(ConfigError, match="device, layers cannot be given"):
        open_text_model(file, device="cuda", layers=["blk.0"])


def test_an_interrupt_leaves_a_text_where_it_was(file: Path) -> None:
    """Wherever it comes in a prompt: nothing stays leased, and the same tokens go on."""

    class EndError(Exception):
        pass

    def end(*_: object) -> None:
        raise EndError

    ids = IDS * 8
    with open_text_model(file, "30%", prefetch="off") as model:
        cache = model.new_cache()
        model.read(IDS, cache)
        wanted = model.read(ids, model.new_cache())
        before, num_ended = signal.signal(signal.SIGALRM, end), 0
        try:
            for microseconds in range(100, 4000, 400):
                try:
                    signal.setitimer(signal.ITIMER_REAL, microseconds / 1e6)
                    model.read(ids, cache)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    time.sleep(0.001)
                except EndError:
                    num_ended += 1
                    # It may come after the last layer, too.
                    assert cache.length in (len(IDS), len(IDS) + len(ids))
                cache.length = len(IDS)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert num_ended
        assert np.array_equal(model.read(ids, model.new_cache()), wanted)


def run_text(
    model: TextModel, prompt: list[int], num: int, prefixes: PrefixCache | None = None
) -> tuple[list[int], int]:
    """Return the tokens of a text, and how many of the prompt's were known."""
    stream = TokenTimes()
    sampler = Sampler(Sampling(temperature=0.0))
    continue_text(model, prompt, sampler, stream, max_new_tokens=num, prefixes=prefixes)
    return stream.tokens, stream.cached_tokens


def test_a_text_goes_on_from_what_is_known_of_it(model: TextModel) -> None:
    """Of an earlier prompt and its answer; with the tokens that it has without."""
    rng = np.random.default_rng(1)
    prefixes = PrefixCache(b"", 32, 2**24, part_tokens=8)
    prompt, num_before = IDS[:21], 1
    for turn in range(4):
        wanted, num_known = run_text(model, prompt, 12)
        assert num_known == 0
        found, num_known = run_text(model, prompt, 12, prefixes)
        assert found == wanted
        # The last token of an answer is drawn, and not read.
        assert num_known == (num_before - 1) // 8 * 8
        num_before = len(prompt) + len(found)
        prompt = prompt + found + rng.integers(3, 90, 9 + turn).tolist()
    # Another end, within a page.
    other = [*prompt[:45], 7, 8, 9]
    assert run_text(model, other, 5, prefixes) == (run_text(model, other, 5)[0], 40)


def test_a_text_that_is_stopped_is_known_as_far_as_it_came(model: TextModel) -> None:
    """With its answer; a cache that is closed keeps nothing."""

    class Stopping(TokenTimes):
        def take(self, tokens: list[int]) -> None:
            self.stopped = len(self.tokens) == num

    sampler = Sampler(Sampling(temperature=0.0))
    wanted, _ = run_text(model, IDS, 12)
    for num in (1, 9):
        prefixes = PrefixCache(b"", 32, 2**24, part_tokens=8)
        with pytest.raises(Stopped):
            continue_text(model, IDS, sampler, Stopping(), max_new_tokens=12, prefixes=prefixes)
        # All but the last token that was drawn.
        num_known = (len(IDS) + num - 1) // 8 * 8
        assert run_text(model, IDS + wanted, 3, prefixes)[1] == num_known
    with pytest.raises(ConfigError, match="leaves no room"):
        run_text(model, [3] * model.context, 3, prefixes)
    prefixes.close()
    assert run_text(model, IDS, 12, prefixes) == (wanted, 0)


def test_a_files_own_pages_are_found_by_another_process(
    model: TextModel, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by no other model of the same name, size, time and head."""
    folder, other = tmp_path / "pages", tmp_path / file.name
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    other.write_bytes(content)
    known = file.stat()
    os.utime(other, ns=(known.st_atime_ns, known.st_mtime_ns))
    monkeypatch.setattr("moecache.decoding.prefixes._SAMPLE_BYTES", 1024)
    found = []
    for path in (file, file, other):
        with (
            open_text_model(path, "50%") as opened,
            contextlib.closing(
                open_prefixes(opened, 2**24, directory=folder, max_disk_bytes=2**24)
            ) as prefixes,
        ):
            found.append(run_text(opened, IDS, 6, prefixes))
    wanted, _ = run_text(model, IDS, 6)
    assert found[:2] == [(wanted, 0), (wanted, 32)]
    assert found[2][1] == 0


def test_pages_of_another_shape_are_left_out(model: TextModel) -> None:
    """With those behind them."""
    cache = model.new_cache()
    model.read(IDS, cache)
    page = cache.page(0, 16)
    keys = page[0][0]
    others = [page[:-1], tuple((k.astype(np.float32), v) for k, v in page), ((keys, keys[:, :1]),)]
    for other in others:
        assert model.new_cache([page, other, page]).length == 16
    assert model.new_cache([page, cache.page(16, 20)], 400).length == 20


TEMPLATES = [
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}\n{% endfor %}",
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ eos_token }}",
    "{%- if tools %}T{%- endif %}\n  {% generation %}{{ messages | tojson }}{% endgeneration %}\n.",
    (
        "{%- set ns = namespace(n=0) %}{% for m in 'abc' %}{%- set ns.n = ns.n + 1 %}\n"
        "{% if ns.n > 1 %}{% break %}{% endif %}{% endfor %}{{ ns.n }}"
    ),
    "{{ strftime_now('%Y') }}{{ messages[0].content.split('o')[-1] }}{{ nothing is defined }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_chats_are_those_of_transformers(template: str) -> None:
    """The same tokens, special ones among them."""
    from moecache.decoding.gguf.tokenizer import read_tokenizer
    from moecache.integrations.transformers.gguf import find_tokenizer

    said = {**byte_level("qwen2", num_tokens=300), "tokenizer.chat_template": template}
    said["tokenizer.ggml.eos_token_id"] = said["tokenizer.ggml.tokens"].index("<|im_end|>")
    messages = [{"role": "user", "content": " hello to <you>, \u00e9\n"}]
    theirs = find_tokenizer(said).apply_chat_template(messages, add_generation_prompt=True)
    assert read_tokenizer(said).encode_chat(messages) == theirs["input_ids"]


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (None, "has no chat template"),
        ({"tool_use": "x"}, "has no chat template"),
        ("{{ raise_exception('no users') }}", "template failed: no users;"),
        ("{% if %}", "template failed: "),
        ("{{ messages.append(1) }}", "template failed: "),
        ("{{ ''.__class__.__mro__ }}", "template failed: "),
    ],
)
def test_templates_that_fail_are_told(template: Any, error: str) -> None:
    """One line, with what to do instead; nothing outside can be reached."""
    from moecache.decoding.files.chat import render

    with pytest.raises(ConfigError, match=error):
        render(template, [{"role": "user", "content": "hello"}], {})
