"""Prompts that a program reads: near the modules' own, and the same bits however they are cut."""

import copy
import json
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache import cli
from moecache.errors import ConfigError, StoreError
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.gguf_members import MODELS
from tests.helpers.gguf_models import write_gguf
from tests.helpers.kernels import computing
from tests.helpers.more_families import MORE_FAMILIES
from tests.helpers.offloading import (
    generated,
    load_in_slots,
    load_whole,
    without_least_steps,
)
from tests.helpers.pages import run_child

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from moecache.decoding.program_texts import ProgramTexts  # noqa: E402
from moecache.decoding.sampler import Sampler  # noqa: E402
from moecache.decoding.streams import TokenTimes  # noqa: E402
from moecache.integrations.transformers import (  # noqa: E402
    _decoding,
    _layer_experts,
    continuing,
    generation,
    load,
    prompts,
    reading,
)
from moecache.integrations.transformers._decoded import DecodedModel, decoded_model  # noqa: E402
from moecache.integrations.transformers.served import Served  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

STATEFUL = (
    "qwen3_5_moe",
    "qwen3_next",
    "nemotron_h",
    "lfm2_moe",
    "granitemoehybrid",
    "kimi_linear",
)
NAMES = (
    *("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "deepseek_v2", "deepseek_v3", "phimoe"),
    *("afmoe", "exaone_moe", "hunyuan_v1_moe", "granitemoe", *STATEFUL),
)
PART = 24


@pytest.fixture(name="short_parts")
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a program read prompts in parts of a few tokens."""
    monkeypatch.setattr(_decoding, "PROMPT_TOKENS", PART)
    monkeypatch.setattr("moecache.decoding.program_model.PROMPT_TOKENS", PART)


@pytest.fixture(name="model", params=["qwen3_moe", "qwen3_5_moe", "nemotron_h", "exaone_moe"])
def _model(request: pytest.FixtureRequest, tmp_path: Path, short_parts: None) -> Iterator[Any]:
    """Return a model that a program computes, a quarter of its experts in slots."""
    model = load_in_slots(written(request.param, tmp_path), compute="fast")
    with model.moecache, torch.no_grad():
        assert model.moecache.decoder.reads_prompts(), model.moecache.decoder.reason
        yield without_least_steps(model)


@pytest.fixture(name="integers", scope="module")
def _integers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a GGUF file of a Qwen3-MoE whose matrices are all of integers."""
    pytest.importorskip("gguf")
    widths = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32}
    tiny = replace(MODELS["qwen3moe"], settings={**MODELS["qwen3moe"].settings, **widths})
    original = tiny.build()
    path = tmp_path_factory.mktemp("integers") / "model.gguf"
    types = {"exps.weight": "Q4_0", "attn_": "Q8_0", "token_embd": "Q8_0", "output.": "Q4_0"}
    write_gguf(path, tiny.metadata(original.config), tiny.tensors(original), types)
    return path


def written(name: str, folder: Path, dtype: str = "float32") -> Path:
    """Return a checkpoint of a family."""
    return write_checkpoint({**MORE_FAMILIES, **FAMILIES}[name], folder, dtype)


def tokens_of(num: int, batch: int = 1) -> Any:
    """Return random tokens, int64 [batch, num]."""
    drawn = torch.Generator().manual_seed(num)
    return torch.randint(3, 90, (batch, num), generator=drawn)


def read(model: Any, ids: Any, cuts: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """Return the logits after each token of a prompt that comes in parts, and its cache."""
    cache, found = prompts.new_cache(model), []
    for begin, end in pairwise((0, *cuts, ids.shape[1])):
        found.append(model(ids[:, begin:end], past_key_values=cache).logits)
    return torch.cat(found, 1), cache


def held(cache: Any) -> list[Any]:
    """Return copies of all that a cache holds, with its layers' lengths."""
    found: list[Any] = []
    for layer in cache.layers:
        tensors = [getattr(layer, name, None) for name in ("keys", "values")]
        for name in ("conv_states", "recurrent_states"):
            tensors += getattr(layer, name, {}).values()
        found += [None if one is None else one.clone() for one in tensors]
        found.append(getattr(layer, "cumulative_length", None))
    return found


def same(one: list[Any], other: list[Any]) -> bool:
    """Return whether two caches hold the same."""
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_what_its_own_forward_makes_of_it(
    tmp_path: Path, short_parts: None, name: str
) -> None:
    """Logits of all tokens and the cache; with the same bits in any slots, threads and parts."""
    path, ids = written(name, tmp_path), tokens_of(61)
    whole = without_least_steps(load_whole({**MORE_FAMILIES, **FAMILIES}[name], path))
    with torch.no_grad():
        out = whole(ids, use_cache=True)
        wanted, cache = out.logits, out.past_key_values
        found = []
        for memory, threads, cuts in (("100%", 1, ()), ("100%", 2, (17, 40)), (None, 1, (1, 2))):
            with computing(threads=threads):
                model = load_in_slots(path, memory, compute="fast")
                with model.moecache:
                    assert model.moecache.decoder.reads_prompts(), model.moecache.decoder.reason
                    logits, own = read(model, ids, cuts)
                    found.append([logits, *held(own)])
                    # Modules go on from it.
                    token = torch.tensor([[5]])
                    del model.__dict__["forward"]
                    after = model(token, past_key_values=own).logits
        expected = whole(token, past_key_values=cache).logits
    assert (found[0][0] - wanted).norm() < 5e-6 * wanted.norm()
    assert (after - expected).norm() < 5e-6 * expected.norm()
    assert all(same(one, found[0]) for one in found)
    for mine, other in zip(found[0][1:], held(out.past_key_values), strict=True):
        assert type(mine) is type(other)
        if isinstance(mine, torch.Tensor):
            assert mine.dtype == other.dtype


@pytest.mark.parametrize("name", ["qwen3_moe", "exaone_moe", *STATEFUL])
def test_a_cache_has_the_form_that_modules_give_it(
    tmp_path: Path, short_parts: None, name: str
) -> None:
    """In bfloat16: dtypes and shapes; and one made without a configuration."""
    model = load_in_slots(written(name, tmp_path, "bfloat16"), compute="fast")
    ids = tokens_of(40)
    with model.moecache, torch.no_grad():
        assert model.moecache.decoder.reads_prompts()
        forms = []
        for _ in range(2):
            _, cache = read(model, ids)
            forms.append(
                [(type(one), one.dtype, one.shape) for one in held(cache) if hasattr(one, "shape")]
            )
            model.__dict__.pop("forward", None)
        assert forms[0] == forms[1]


def test_a_cache_without_layers_gets_some(qwen3_moe: Path, short_parts: None) -> None:
    """As modules append one after the other; a call without a cache returns one."""
    from transformers import DynamicCache

    model = load_in_slots(qwen3_moe, compute="fast")
    ids = tokens_of(30)
    with model.moecache, torch.no_grad():
        assert model.moecache.decoder.reads_prompts()
        cache = DynamicCache()
        found = model(ids, past_key_values=cache).logits
        assert cache.get_seq_length() == 30
        out = model(ids)
        assert torch.equal(found, out.logits)
        assert same(held(cache), held(out.past_key_values))
        assert model.moecache.decoder.num_steps == 0


def test_rows_of_a_batch_have_the_bits_that_they_have_alone(model: Any) -> None:
    """Of sequences of one length, also behind others; padded ones go through the modules."""
    ids = tokens_of(50, 3)
    together, cache = read(model, ids, (20,))
    alone = [read(model, ids[row : row + 1]) for row in range(3)]
    assert torch.equal(together, torch.cat([logits for logits, _ in alone]))
    token = torch.tensor([[7], [8], [9]])
    after = model(token, past_key_values=cache).logits
    for row, (_, own) in enumerate(alone):
        assert torch.equal(model(token[row : row + 1], past_key_values=own).logits[0], after[row])


def test_a_text_has_the_loss_that_its_own_forward_gives_it(
    qwen3_moe: Path, short_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a program's logits; what is not the usual loss is left to the modules."""
    model, ids = load_in_slots(qwen3_moe, compute="fast"), tokens_of(50, 2)
    labels = ids.masked_fill(torch.arange(50) % 7 == 0, -100)
    with model.moecache, torch.no_grad():
        own, calls = type(model).forward, []
        expected = own(model, ids, labels=labels).loss
        monkeypatch.setattr(
            type(model.model), "forward", lambda *given, **named: calls.append(1) or 1 / 0
        )
        out = model(ids, labels=labels)
        assert not calls
        assert (out.loss - expected).abs() < 1e-5 * expected
        assert out.to_tuple()[0] is out.loss
        assert torch.equal(out.logits, model(ids).logits)
        for others in ({"labels": labels[:, 1:]}, {"labels": labels, "logits_to_keep": 3}):
            with pytest.raises(ZeroDivisionError):
                model(ids, **others)


@pytest.mark.parametrize("num_before", [0, 30])
def test_a_prompt_that_fails_leaves_its_cache_as_it_was(
    model: Any, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    """In its second part; the same call gives the same bits as if nothing had happened."""
    ids = tokens_of(num_before + PART + 20)
    expected, _ = read(model, ids)
    cache = prompts.new_cache(model)
    if num_before:
        model(ids[:, :num_before], past_key_values=cache)
    before, kinds = held(cache), [type(layer) for layer in cache.layers]
    rows, calls = _layer_experts.fast_rows, []

    def failing(runtime: Any, layer: int, *given: Any, **named: Any) -> Any:
        calls.append(layer)
        # Layers before the last one of the second part have been written to.
        if calls.count(last) == 2:
            raise StoreError("the disk failed")
        return rows(runtime, layer, *given, **named)

    last = model.moecache.runtime.layout.num_layers - 1
    # A quarter of a layer's experts does not do for a part's tokens.
    with monkeypatch.context() as patched:
        patched.setattr(_layer_experts, "fast_rows", failing)
        with pytest.raises(StoreError, match="the disk failed"):
            model(ids[:, num_before:], past_key_values=cache)
    assert cache.get_seq_length() == num_before
    assert same(held(cache), before)
    assert [type(layer) for layer in cache.layers] == kinds
    found = model(ids[:, num_before:], past_key_values=cache).logits
    assert torch.equal(found, expected[:, num_before:])


def test_texts_have_the_tokens_of_generate(model: Any) -> None:
    """And their logits the bits of a forward's, read as a whole, in parts, and side by side."""
    ids = tokens_of(70)
    wanted = generated(model, ids, num_tokens=12)[0, 70:].tolist()
    times = TokenTimes()
    generation.continue_tokens(model, ids, times, max_new_tokens=12, temperature=0)
    assert times.tokens == wanted
    decoded = decoded_model(model)
    assert decoded is not None
    expected = [model(ids[:, :num]).logits[0, -1].numpy() for num in (70, 20, 45)]
    own = [decoded.read(ids[0, :num].tolist(), decoded.new_cache()) for num in (70, 20, 45)]
    assert all(map(np.array_equal, own, expected))
    cache = decoded.new_cache()
    for begin, end in pairwise((0, 3, 40, 70)):
        found = decoded.read(ids[0, begin:end].tolist(), cache)
    assert np.array_equal(found, expected[0])
    parts = [ids[0, :9].tolist(), ids[0, :15].tolist()]
    rows = decoded.read_together(parts, [decoded.new_cache(), decoded.new_cache()])
    for row, part in zip(rows, parts, strict=True):
        assert np.array_equal(row, decoded.read(part, decoded.new_cache()))


@pytest.mark.parametrize("name", ["qwen3_5_moe", "exaone_moe", "deepseek_v3"])
def test_a_conversation_is_read_once(tmp_path: Path, short_parts: None, name: str) -> None:
    """A turn finds the pages of those before it, its answers' too, with the bits that it has."""
    model = load_in_slots(written(name, tmp_path), compute="fast")
    with model.moecache, torch.no_grad():
        prefixes = reading.open_prefixes(model, 2**26, directory=tmp_path / "pages")
        assert prefixes is not None
        prompt = tokens_of(70)[0].tolist()
        for turn in range(2):
            times = [TokenTimes(), TokenTimes()]
            for known, one in zip((prefixes, None), times, strict=True):
                generation.continue_tokens(
                    model,
                    torch.tensor([prompt]),
                    one,
                    max_new_tokens=15,
                    temperature=0,
                    prefixes=known,
                )
            assert times[0].tokens == times[1].tokens
            # All but what stands behind the last place where a page, or a part of one, ends.
            assert times[0].cached_tokens == turn * (64 if name == "qwen3_5_moe" else 80)
            prompt += [*times[0].tokens, *tokens_of(9)[0].tolist()]
        prefixes.close()


def test_pages_of_other_weights_are_not_found(model: Any, tmp_path: Path) -> None:
    """Of weights that were replaced since, and of a trunk whose weights stay quantized."""
    prefixes = reading.open_prefixes(model, 2**24)
    ids = tokens_of(90)

    def known() -> int:
        times = TokenTimes()
        given = {"max_new_tokens": 2, "temperature": 0, "prefixes": prefixes}
        generation.continue_tokens(model, ids, times, **given)
        return times.cached_tokens

    known()
    assert known() > 0
    before = reading._identity(model)
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight)
    assert known() == 0
    own = type(model.lm_head)
    model.lm_head.__class__ = type("Quantized", (own,), {})
    other = reading._identity(model)
    model.lm_head.__class__ = own
    assert other != before


def test_a_model_that_changes_is_not_gone_on_with(model: Any) -> None:
    """A hook has the modules read prompts, and a text that had begun says so."""
    decoded = decoded_model(model)
    assert decoded is not None
    cache = decoded.new_cache()
    decoded.read([5, 6, 7], cache)
    seen: list[int] = []
    hook = model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(ConfigError, match=r"are not a program's: .*hook"):
        decoded.read([8], cache)
    assert cache.length == 3
    assert decoded_model(model) is None
    ids = tokens_of(40)
    logits = model(ids).logits
    assert seen
    hook.remove()
    assert (model(ids).logits - logits).norm() < 3e-6 * logits.norm()
    decoded.read([8], cache)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe", "deepseek_v3"])
def test_bfloat16_is_multiplied_by_bfloat16(tmp_path: Path, short_parts: None, name: str) -> None:
    """With the same bits in any slots, threads and parts; as near to float32 as its modules are."""
    path, ids = written(name, tmp_path, "bfloat16"), tokens_of(61)
    found = []
    with torch.no_grad():
        for memory, threads, cuts in (("100%", 1, ()), ("100%", 2, (17, 40)), (None, 1, (1, 2))):
            with computing(threads=threads):
                model = load_in_slots(path, memory, compute="fast")
                with model.moecache:
                    assert model.moecache.decoder.reads_prompts(), model.moecache.decoder.reason
                    with model.moecache.decoder.computing() as how:
                        assert how.step.product_type == "bf16"
                    logits, cache = read(model, ids, cuts)
                    found.append([logits, *held(cache)])
        family = {**MORE_FAMILIES, **FAMILIES}[name]
        own = load_whole(family, path, "bfloat16")(ids).logits
        exact = load_whole(family, path)(ids).logits
    assert all(same(one, found[0]) for one in found)
    off, of_modules = ((logits - exact).norm() / exact.norm() for logits in (found[0][0], own))
    assert off < 1.2 * of_modules


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_of_integers_have_prompts_by_a_program(integers: Path, dtype: str) -> None:
    """Served side by side, each text has what it has alone; pages of modules are none of theirs."""
    model = load(integers, "50%", dtype=getattr(torch, dtype), compute="fast", trunk="native")
    with model.moecache, torch.no_grad():
        assert isinstance(decoded_model(model), DecodedModel)
        assert "0 were, and prompts go by the program, too" in model.moecache.report()
        served = Served(model)
        together = served.together()
        assert isinstance(together, ProgramTexts)
        prompts_of = [tokens_of(num)[0].tolist() for num in (90, 20, 35)]
        prefixes = reading.open_prefixes(model, 2**24)
        assert prefixes is not None
        times = [TokenTimes() for _ in prompts_of]
        for prompt, one in zip(prompts_of, times, strict=True):
            drawn = served.sampling_of(1, temperature=0.7)
            together.add(
                served.new_text(
                    prompt,
                    Sampler(drawn, prompt),
                    one,
                    max_new_tokens=9,
                    mask=None,
                    prefixes=prefixes,
                )
            )
        over: list[Any] = []
        while len(over) < 3:
            over += together.advance()
        assert [text.error for text in over] == [None] * 3
        for prompt, one in zip(prompts_of, times, strict=True):
            alone = TokenTimes()
            generation.continue_tokens(
                model,
                torch.tensor([prompt]),
                alone,
                max_new_tokens=9,
                seed=1,
                temperature=0.7,
            )
            assert alone.tokens == one.tokens
        # A text of the modules' finds none of a program's pages.
        text = continuing.Text(
            model, prompts_of[0], Sampler(drawn, prompts_of[0]), TokenTimes(),
            max_new_tokens=1, prefixes=prefixes,
        )  # fmt: skip
        text.read(8)
        assert text.streamer.cached_tokens == 0


def test_copies_of_a_cache_go_their_own_ways(model: Any) -> None:
    """As those that beams and drafts make."""
    _, cache = read(model, tokens_of(30))
    other = copy.deepcopy(cache)
    more = tokens_of(33)
    first = model(more, past_key_values=cache).logits
    assert torch.equal(model(more, past_key_values=other).logits, first)


def test_inspect_says_how_prompts_go(
    integers: Path, qwen3_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the program, unless angles depend on a text's length."""
    for path in (integers, qwen3_moe):
        assert cli.main(["inspect", str(path)]) == 0
        assert "one compiled call each; prompts in parts, a call each" in capsys.readouterr().out
    shutil.copytree(qwen3_moe, tmp_path, dirs_exist_ok=True)
    config = json.loads((qwen3_moe / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["inspect", str(tmp_path)]) == 0
    found = capsys.readouterr().out
    assert "one compiled call each" in found
    assert "prompts in parts" not in found


@pytest.mark.parametrize("name", ["qwen3_moe", "exaone_moe", "qwen3_5_moe"])
def test_what_modules_began_goes_on_after_a_failure(
    tmp_path: Path, short_parts: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A padded batch by modules, a prompt that fails, again, and a token; and an empty cache."""
    model = load_in_slots(written(name, tmp_path), compute="fast")
    compute = _decoding.Decoder._compute

    def failing(self: Any, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise StoreError("the disk failed")
        return compute(self, *given)

    def attempt(cache: Any, mask: Any = None) -> None:
        calls.clear()
        with monkeypatch.context() as patched:
            patched.setattr(_decoding.Decoder, "_compute", failing)
            with pytest.raises(StoreError):
                model(more, past_key_values=cache, attention_mask=mask)

    calls: list[int] = []
    with model.moecache, torch.no_grad():
        mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
        begun = model(tokens_of(6, 2), attention_mask=mask).past_key_values
        more = tokens_of(2 * PART, 2)
        wide = torch.cat([mask, torch.ones_like(more)], 1)
        expected = model(more, past_key_values=copy.deepcopy(begun), attention_mask=wide).logits
        attempt(begun, wide)
        found = model(more, past_key_values=begun, attention_mask=wide).logits
        assert torch.equal(found, expected)
        cache = prompts.new_cache(model)
        attempt(cache)
        # Nothing of what it had grown to is kept.
        assert not model.moecache.decoder._pages._last.keys() & {id(cache)}
        out = model(more, past_key_values=cache, output_hidden_states=True)
        again = model(torch.tensor([[5], [6]]), past_key_values=cache).logits
        wanted, own = read(model, more)
        assert (out.logits - wanted).norm() < 5e-6 * wanted.norm()
        expected = model(torch.tensor([[5], [6]]), past_key_values=own).logits
        assert (again - expected).norm() < 5e-6 * expected.norm()


def test_caches_and_answers_of_other_kinds_are_the_modules(
    qwen3_moe: Path, short_parts: None
) -> None:
    """A subclass of transformers' cache, none at all, and tuples."""
    from transformers import DynamicCache

    class Own(DynamicCache):  # type: ignore[misc]
        pass

    model = load_in_slots(qwen3_moe, compute="fast")
    ids = tokens_of(600)
    with model.moecache, torch.no_grad():
        expected = model(ids).logits
        found = model(ids, past_key_values=Own(config=model.config)).logits
        assert (found - expected).norm() < 5e-6 * expected.norm()
        model.config.use_cache = False
        # Two texts, one behind the other, which only the modules tell apart.
        places = torch.cat([torch.arange(300), torch.arange(300)])[None]
        out = model(ids, position_ids=places)
        assert out.past_key_values is None
        first = model(ids[:, 300:], use_cache=True).logits
        assert (out.logits[:, 300:] - first).norm() < 5e-6 * first.norm()
        assert isinstance(model(ids, return_dict=False), tuple)


def test_whoever_is_told_how_far_a_prompt_is_may_ask(model: Any) -> None:
    """Of the model, in the same thread, and is told before each layer."""
    decoded = decoded_model(model)
    assert decoded is not None
    ids = tokens_of(PART + 9)[0].tolist()
    expected = decoded.read(ids, decoded.new_cache())
    told: list[int] = []

    def on_read(num: int) -> None:
        told.append(num)
        assert model.moecache.decoder.is_ready()
        decoded.read([5, 6], decoded.new_cache())

    found = decoded.read(ids, decoded.new_cache(), on_read)
    assert np.array_equal(found, expected)
    # A few tokens have the program that others have, too.
    short = decoded.read(ids[:10], decoded.new_cache())
    told.clear()
    assert np.array_equal(decoded.read(ids[:10], decoded.new_cache(), on_read), short)
    assert told == [10]
    told.clear()
    decoded.read(ids, decoded.new_cache(), on_read)
    assert told == sorted(told)
    assert len(told) >= 2 * decoded.num_layers
    assert told[-1] == len(ids)


def test_a_child_is_told_that_the_model_is_its_parents(integers: Path) -> None:
    """Also while another thread reads a prompt."""
    program = f"""
        import os, threading
        import torch
        from moecache.errors import MoeCacheError
        from moecache.integrations.transformers import load
        from moecache.integrations.transformers._decoded import decoded_model
        model = load({str(integers)!r}, "50%")
        begun, over = threading.Event(), threading.Event()
        decoded = decoded_model(model)
        def read(num):
            begun.set()
            over.wait(60)
        reading = threading.Thread(target=decoded.read, args=([5] * 40, decoded.new_cache(), read))
        reading.start()
        begun.wait(60)
        child = os.fork()
        if not child:
            code = 1
            try:
                with torch.no_grad():
                    model(torch.tensor([[5] * 20]))
            except MoeCacheError as error:
                code = 0 if "parent" in str(error) else 2
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        over.set()
        reading.join()
        """
    done = run_child(textwrap.dedent(program))
    assert done.stdout.split() == ["0"], done.stderr
