"""Texts on a GPU: their tokens are graphs by themselves, and have the same bits without.

On the device made for tests, torch's operators are noted and done again in the same memory; the
same tests run on a GPU where there is one.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache import cli
from moecache.decoding.sampler import Sampler, Sampling
from moecache.errors import CapacityError, MoeCacheError, StoreError
from tests.helpers import quantized
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.mutants import mutated
from tests.helpers.nightly import some
from tests.helpers.serving import serving, write_chat_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from moecache.decoding.streams import TokenTimes  # noqa: E402
from moecache.integrations.transformers import (  # noqa: E402
    _device_tokens,
    _offload,
    generation,
)
from moecache.integrations.transformers._device_tokens import DeviceTokens  # noqa: E402
from moecache.integrations.transformers._token_graph import TokenGraph  # noqa: E402
from tests.helpers.token_graphs import fast, prepared  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
# Without these lines of `_device_tokens` a text is another, or no graph.
MUTANTS = {
    "the cache is not cleared": ("    cache.reset()\n", ""),
    "a larger cache is empty": (
        "                    _move(made.cache, larger.cache, length)\n",
        "",
    ),
    "the prompt is left out": ("            _move(read, made.cache, length)\n", ""),
    "a full cache is written to": ("if length >= made.size:", "if False:"),
    "changes are not seen": ("if state != self._state:", "if not self._state:"),
    "hooks are left out": ('startswith("moecache.")', 'startswith("")'),
    "there is no graph": ("made.graph = TokenGraph(model, made.cache)", "pass"),
    "each text has graphs anew": ("self._made.pop(size, None) or _Made", "_Made"),
}
PROMPT = torch.arange(20)[None] * 7 % 120 + 1  # 0 is padding
NUM_TOKENS = 10


@pytest.fixture(params=["fake", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a device as torch knows it; "cuda" opens slots there."""
    return prepared(request.param, monkeypatch)


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("texts") / "model"
    return write_checkpoint(FAMILIES["qwen3_moe"], directory, "bfloat16")


@pytest.fixture(name="small")
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a text outgrow its cache."""
    shrink(_device_tokens, monkeypatch)


def shrink(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let caches hold few tokens, and short texts have graphs."""
    for name, value in {"LEAST_TOKENS": 8, "_ROOM": 2, "_FEW_TOKENS": 2}.items():
        monkeypatch.setattr(module, name, value)


def text(
    model: Any, prompt: Any = PROMPT, num_tokens: int = NUM_TOKENS, **sampling: Any
) -> tuple[list[int], list[np.ndarray]]:
    """Return a text's tokens, and the logits of each."""
    drawn: list[np.ndarray] = []

    class Noting(Sampler):
        def draw(self, logits: np.ndarray, allowed: Any = None) -> int:
            drawn.append(logits.copy())
            return super().draw(logits, allowed)

    def make(sampling: Sampling, tokens: Sequence[int]) -> Sampler:
        return Noting(sampling, tokens)

    times = TokenTimes()
    generation.continue_tokens(
        model,
        prompt,
        times,
        max_new_tokens=num_tokens,
        make_sampler=make,
        **{"temperature": 0.0, **sampling},
    )
    return times.tokens, drawn


@contextlib.contextmanager
def without(model: Any) -> Iterator[None]:
    """Return a context in which no graph is used."""
    tokens = model.moecache.tokens
    tokens._graph = lambda *_: None
    yield
    del tokens._graph


def assert_same(found: Any, wanted: Any) -> None:
    """Compare tokens and the bits of their logits."""
    assert found[0] == wanted[0]
    assert len(found[1]) == len(wanted[1])
    assert all(np.array_equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))


@pytest.mark.parametrize(
    ("memory", "sampling"),
    some(
        [("25%", {}), ("50%", {"temperature": 0.9, "seed": 5}), ("100%", {})],
        lambda case: case[0] != "100%",
    ),
)
def test_a_text_has_the_same_bits_with_graphs_and_without(
    gpu: str, path: Path, memory: str, sampling: Any, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    """While it outgrows its cache, too; and the likeliest tokens are those of transformers' loop.

    That one has a cache of another kind, for which torch rounds otherwise.
    """
    model = fast(path, memory)
    with model.moecache as offload:
        with without(model):
            wanted = text(model, **sampling)
        assert offload.tokens.num_graphs == 0
        found = text(model, **sampling)
        assert offload.tokens.num_graphs >= NUM_TOKENS - 3
        assert f"tokens are CUDA graphs; {offload.tokens.num_graphs} were" in offload.report()
        with monkeypatch.context() as patched:
            patched.setattr(DeviceTokens, "why_not_static", lambda _: "a test")
            loop = text(model, **sampling)
            assert "tokens go through the model's modules: a test" in offload.report()
        offload.runtime.cache.check()
    assert_same(found, wanted)
    assert len(set(found[0])) > 3
    assert sampling or loop[0] == found[0]
    # The prompt is read alike.
    assert np.array_equal(loop[1][0], found[1][0])


@pytest.mark.parametrize("name", ["gemma4_text", "gpt_oss"])
def test_sliding_windows_are_taken(gpu: str, name: str, tmp_path: Path, small: None) -> None:
    """Nearly the logits of transformers' cache, which drops what is outside of the window."""
    if name == "gpt_oss":
        checkpoint, _ = quantized.write_quantized(quantized.GPT_OSS, quantized.mxfp4(), tmp_path)
    else:
        checkpoint = write_checkpoint(FAMILIES[name], tmp_path / "model", "bfloat16")
    model = fast(checkpoint, "50%")
    with model.moecache as offload:
        found, logits = text(model)
        assert offload.tokens.num_graphs > 0
        cache = transformers.DynamicCache(config=model.config)
        assert type(cache.layers[0]).__name__ == "DynamicSlidingWindowLayer"
        given = PROMPT.to(model.device)
        with torch.no_grad():
            for token, one in zip(found, logits, strict=True):
                own = model(given, past_key_values=cache).logits[0, -1].float().cpu().numpy()
                np.testing.assert_allclose(one, own, rtol=0, atol=np.abs(own).max() / 32)
                given = torch.tensor([[token]], device=model.device)


def test_earlier_texts_leave_nothing(gpu: str, path: Path, small: None) -> None:
    """A cache is cleared for the next text, whose graph it is; short ones make none."""
    other = PROMPT.flip(1)[:, :5]
    model = fast(path, "50%")
    with model.moecache as offload:
        text(model, num_tokens=2)
        assert offload.tokens.num_graphs == 0
        fresh = text(model, other)
        made = list(offload.tokens._made.values())
        text(model)
        text(model, PROMPT[:, 3:])
        again = text(model, other)
        assert offload.tokens._made[made[-1].size] is made[-1]
    assert_same(again, fresh)


def test_a_model_that_changes_gets_graphs_of_its_own(gpu: str, path: Path, small: None) -> None:
    """Other weights, another attention; with a hook there is none, and the report says so."""
    model = fast(path, "50%")
    with model.moecache as offload:
        text(model)
        norm = model.model.norm
        norm.weight = torch.nn.Parameter(norm.weight.detach() * -1)
        changed = text(model)
        with without(model):
            assert_same(changed, text(model))
        model.set_attn_implementation("eager")
        assert_same(text(model), text(model))
        model.set_attn_implementation("sdpa")
        seen: list[int] = []
        hook = norm.register_forward_hook(lambda *_: seen.append(1))
        before = offload.tokens.num_graphs
        assert_same(text(model), changed)
        assert len(seen) == NUM_TOKENS
        assert offload.tokens.num_graphs == before
        assert "RMSNorm has a hook, which a graph would leave out" in offload.report()
        hook.remove()
        assert_same(text(model), changed)
        assert offload.tokens.num_graphs > before


@pytest.mark.parametrize(
    ("num_tokens", "context", "size"),
    [
        (1, None, 1024),
        (1024, None, 1024),
        (1025, None, 2048),
        (2100, None, 3072),
        (4156, None, 6144),
        (9000, 10_000, 10_000),
        (9000, None, 12_288),
    ],
)
def test_caches_come_in_few_sizes(num_tokens: int, context: int | None, size: int) -> None:
    """None beyond the context; a third of one, or a thousand tokens, is too much at most."""
    assert _device_tokens._size(num_tokens, context) == size
    assert _device_tokens._size(size, context) == size


def test_what_cannot_be_captured_is_computed_eagerly(
    gpu: str, path: Path, monkeypatch: pytest.MonkeyPatch, small: None, caplog: Any
) -> None:
    """The reason is in the report and the log, once."""
    model = fast(path, "50%")
    with model.moecache as offload:
        wanted = text(model)

        def fail(*_: object) -> None:
            raise RuntimeError("a copy from the host\nis not permitted")

        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
            patched.setattr(TokenGraph, "_capture", fail)
            offload.tokens.close()
            assert_same(text(model), wanted)
            assert_same(text(model), wanted)
        assert "modules: a copy from the host is not permitted" in offload.report()
        assert [r.levelname for r in caplog.records if "no_graph" in r.message] == ["WARNING"]


def test_a_token_that_a_graph_has_no_slots_for_is_computed_eagerly(
    gpu: str, path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    """And the next one is a graph again; an expert that cannot be read is an error."""
    model = fast(path, "50%")
    with model.moecache as offload:
        wanted = text(model)
        call, calls = TokenGraph.__call__, []

        def refuse(self: Any, token: Any) -> Any:
            calls.append(token)
            if len(calls) == 3:
                raise CapacityError("no slots")
            return call(self, token)

        monkeypatch.setattr(TokenGraph, "__call__", refuse)
        assert_same(text(model), wanted)
        assert offload.tokens.num_eager >= 1
        assert "went through the model's modules" in offload.report()

        def fail(*_: object) -> Any:
            raise StoreError("the disk is gone")

        monkeypatch.setattr(TokenGraph, "__call__", fail)
        with pytest.raises(StoreError, match="the disk is gone"):
            text(model)
        monkeypatch.setattr(TokenGraph, "__call__", call)
        assert_same(text(model), wanted)


def test_torchs_products_are_no_graph(gpu: str, path: Path) -> None:
    """The report says how to have graphs."""
    model = fast(path, "50%", compute="torch")
    with model.moecache as offload:
        text(model)
        assert 'and waits for the host; load the model with device="cuda" and compute="fast"' in (
            offload.report()
        )
        assert offload.tokens.num_graphs == offload.tokens.num_eager == 0
    assert "closed" in offload.tokens.describe()


def test_the_command_line_and_the_server_have_graphs(
    gpu: str,
    tiny_moe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`moecache generate` says so with --stats; an answer of the server is the same text."""
    shrink(_device_tokens, monkeypatch)
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    openai = pytest.importorskip("openai")
    directory = write_chat_model(tiny_moe, tmp_path / "tiny")
    question = "def f("
    how = ("--memory", "25%", "--compute", "fast", "--device", "cuda", "--chat", "--stats")
    few = ("--max-new-tokens", "5", "--temperature", "0.8", "--seed", "3")
    assert cli.main(["generate", str(directory), question, *how, *few]) == 0
    shown = capsys.readouterr()
    assert "tokens are CUDA graphs; 4 were" in shown.err
    with serving(directory, device="cuda") as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        with client:
            answer = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": question}],
                max_tokens=5,
                temperature=0.8,
                seed=3,
            )
        assert answer.choices[0].message.content == shown.out.removesuffix("\n")
        assert served.engine.model.model.moecache.tokens.num_graphs == 4


def texts(path: Path) -> list[Any]:
    """Return texts, with graphs: one that outgrows its cache, another, of other weights, a hook."""
    model = fast(path, "50%")
    with model.moecache as offload:
        tokens = offload.tokens
        found: list[Any] = [text(model), text(model, PROMPT.flip(1)[:, :5])]
        made = {size: part.graph for size, part in tokens._made.items()}
        found.append(text(model))
        # The graph of a size is used again; each text but the first token of each is graphs.
        assert all(tokens._made[size].graph is graph for size, graph in made.items())
        assert tokens.num_graphs > NUM_TOKENS
        norm = model.model.norm
        norm.weight = torch.nn.Parameter(norm.weight.detach() * -1)
        found.append(text(model))
        seen: list[int] = []
        norm.register_forward_hook(lambda *_: seen.append(1))
        text(model)
        assert len(seen) == NUM_TOKENS
    return found


@pytest.mark.nightly
def test_a_line_that_is_left_out_is_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the tests."""
    prepared("fake", monkeypatch)
    shrink(_device_tokens, monkeypatch)
    wanted = texts(path)
    for name, (old, new) in MUTANTS.items():
        with monkeypatch.context() as patched:
            (module,) = mutated(patched, [_device_tokens], old, new)
            shrink(module, patched)
            patched.setattr(_offload, "DeviceTokens", module.DeviceTokens)
            try:
                for found, one in zip(texts(path), wanted, strict=True):
                    assert_same(found, one)
            except (AssertionError, IndexError, RuntimeError, MoeCacheError):
                continue
        pytest.fail(name)
