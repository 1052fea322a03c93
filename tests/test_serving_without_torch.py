"""A GGUF file is served without torch, and answers are those of `generate`."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytest.importorskip("gguf")

from moecache.decoding.files.continuing import continue_text, open_prefixes, sampling_of
from moecache.decoding.files.model import TextModel
from moecache.decoding.files.opening import open_text_model
from moecache.decoding.files.tokenizer import FileTokenizer
from moecache.decoding.gguf.tokenizer import read_tokenizer
from moecache.decoding.program_texts import ProgramTexts
from moecache.decoding.sampler import Sampler
from moecache.decoding.streams import TextStream, TokenTimes
from moecache.decoding.text import Text
from moecache.decoding.text_cache import TextCache
from moecache.errors import ConfigError, StoreError
from tests.helpers.gguf_texts import write_text_file
from tests.helpers.pages import run_child
from tests.helpers.serving import Served, serving_file, until

pytestmark = pytest.mark.usefixtures("one_thread")
LONG = "hello, world " * 30


@pytest.fixture(name="text_file", scope="module")
def _text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a quantized file with a tokenizer."""
    return write_text_file(tmp_path_factory.mktemp("served") / "model.gguf")


@pytest.fixture(name="model")
def _model(text_file: Path) -> Iterator[TextModel]:
    """Return its model, with a quarter of its experts in slots."""
    with open_text_model(text_file, "25%", prefetch="off") as model:
        yield model


@pytest.fixture(name="served", scope="module")
def _served(text_file: Path) -> Iterator[Served]:
    """Return a server of the file."""
    with serving_file(text_file, parallel=4) as served:
        yield served


def ask(served: Served, path: str, **body: Any) -> dict[str, Any]:
    """Return a server's answer."""
    request = urllib.request.Request(f"{served.url}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as found:
        answer: dict[str, Any] = json.load(found)
    return answer


def refusal(served: Served, path: str, **body: Any) -> tuple[int, str]:
    """Return the status and the message of a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(served, path, **body)
    return refused.value.code, json.load(refused.value)["error"]["message"]


def text_alone(path: Path, prompt: str | list[dict[str, str]], **drawn: Any) -> str:
    """Return the text that the model writes behind a prompt, with nothing beside it."""
    num = drawn.pop("max_tokens")
    with open_text_model(path, "50%") as model:
        tokenizer = read_tokenizer(model.runtime.store.metadata)
        chat = not isinstance(prompt, str)
        ids = tokenizer.encode_chat(prompt) if chat else tokenizer.encode(prompt)  # type: ignore[arg-type]
        parts = list[str]()
        stream = TextStream(tokenizer, np.array([ids]), parts.append)
        sampler = Sampler(sampling_of(model, **drawn), ids)
        continue_text(model, ids, sampler, stream, max_new_tokens=num)
    return "".join(parts)


def test_answers_beside_each_other_are_those_alone(
    served: Served, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token from one call, prompts of all lengths, with draws of their own."""
    wanted = [
        {"prompt": LONG[: 7 + 60 * number], "max_tokens": 30, "temperature": 0.8, "seed": number}
        for number in range(5)
    ]
    together, begin, sizes = TextModel.read_together, Text.step, list[int]()

    def noted(self: TextModel, ids: Any, caches: Any) -> np.ndarray:
        sizes.append(len(ids))
        return together(self, ids, caches)

    def begun(self: Text) -> None:
        # The first one waits for another.
        until(lambda: bool(sizes) or len(served.engine.answers) > 1)
        begin(self)

    monkeypatch.setattr(TextModel, "read_together", noted)
    monkeypatch.setattr(Text, "step", begun)
    with ThreadPoolExecutor(len(wanted)) as clients:
        answers = list(clients.map(lambda one: ask(served, "/v1/completions", **one), wanted))
    found = [answer["choices"][0]["text"] for answer in answers]
    assert found == [text_alone(text_file, **one) for one in wanted]  # type: ignore[arg-type]
    assert max(sizes) > 1


def test_a_chat_has_what_generate_says(served: Served, text_file: Path) -> None:
    """Also as a stream, by Anthropic's protocol, and with probabilities."""
    messages = [{"role": "user", "content": "hello"}]
    said = text_alone(text_file, messages, max_tokens=12)
    asked: dict[str, Any] = {"messages": messages, "max_tokens": 12}
    chat = ask(served, "/v1/chat/completions", **asked, logprobs=True, top_logprobs=2)
    assert chat["choices"][0]["message"]["content"] == said
    noted = chat["choices"][0]["logprobs"]["content"]
    assert len(noted) == chat["usage"]["completion_tokens"] == 12
    assert all(one["logprob"] == one["top_logprobs"][0]["logprob"] for one in noted)
    message = ask(served, "/v1/messages", **asked, model="model.gguf")
    assert message["content"][0]["text"] == said
    body = json.dumps({**asked, "stream": True}).encode()
    request = urllib.request.Request(f"{served.url}/v1/chat/completions", body)
    with urllib.request.urlopen(request, timeout=60) as lines:
        parts = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    deltas = [part["choices"][0]["delta"].get("content", "") for part in parts if part["choices"]]
    assert "".join(deltas) == said


def test_what_a_server_says_of_a_files_tokens(served: Served) -> None:
    """Its vocabulary, a text's tokens and back, a grammar; what is none is refused."""
    tokens = ask(served, "/tokenize", content="hello, world", with_pieces=True)["tokens"]
    assert "".join(one["piece"] for one in tokens) == "hello, world"
    ids = [one["id"] for one in tokens]
    assert ask(served, "/detokenize", tokens=ids) == {"content": "hello, world"}
    props = served.get("/props")
    assert (props["bos_token"], props["eos_token"]) == ("<|endoftext|>", "<|im_end|>")
    assert props["n_vocab"] == served.engine.model.num_tokens
    assert "m.content" in props["chat_template"]
    counted = ask(
        served,
        "/v1/messages/count_tokens",
        model="model.gguf",
        messages=[{"role": "user", "content": "hello"}],
    )
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}
    answer = ask(served, "/v1/chat/completions", **chat, guided_regex="(10|20){2}")
    assert answer["usage"]["prompt_tokens"] == counted["input_tokens"]
    assert re.fullmatch("(10|20){2}", answer["choices"][0]["message"]["content"])
    refused = {
        "leaves no room": {"prompt": LONG * 9},
        "at least": {"prompt": LONG * 2000},
        "is empty": {"prompt": ""},
        "logit_bias has token": {"prompt": "a", "logit_bias": {"100000": 1}},
    }
    for reason, body in refused.items():
        code, message = refusal(served, "/v1/completions", **body)
        assert (code, reason in message) == (400, True), message
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    code, message = refusal(served, "/v1/chat/completions", **chat, tools=tools)
    assert (code, "chat template has no functions" in message) == (400, True)
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(served, "/v1/chat/completions", **chat, chat_template_kwargs={"documents": []})
    assert json.load(refused.value)["error"]["param"] == "chat_template_kwargs"


def test_templates_see_what_a_request_gives(text_file: Path) -> None:
    """As transformers' own tokenizers have it."""
    transformers = pytest.importorskip("transformers")
    with open_text_model(text_file, "25%") as model:
        plain = read_tokenizer(model.runtime.store.metadata)
    usual = "{{ bos_token }}{{ thinks }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template = {"default": usual, "tool_use": "{{ tools | tojson }}{{ add_generation_prompt }}"}
    tokenizer = FileTokenizer(plain.backend_tokenizer, plain.special, template)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        bos_token=plain.special["bos"],
        eos_token=plain.special["eos"],
        chat_template=template,
    )
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given in ({}, {"thinks": "no "}, {"tools": tools}, {"tools": None}):
        mine = tokenizer.render_chat(messages, given)
        options = {"add_generation_prompt": True, "tokenize": False, **given}
        assert mine == theirs.apply_chat_template(messages, **options)
    with pytest.raises(ConfigError, match="'tokenize' is not for a chat template"):
        tokenizer.render_chat(messages, {"tokenize": True})
    assert set(theirs.all_special_tokens) <= set(tokenizer.all_special_tokens)


def test_thoughts_are_apart_from_what_is_said(text_file: Path) -> None:
    """By the markers of the template; a parser that needs no torch takes them apart."""
    pytest.importorskip("transformers")
    from moecache.integrations.answer_parts import AnswerParser, format_of

    with open_text_model(text_file, "25%") as model:
        plain = read_tokenizer(model.runtime.store.metadata)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think></think>"
    known = format_of(FileTokenizer(plain.backend_tokenizer, plain.special, template))
    assert known is not None
    parser = AnswerParser(known, "")
    pieces = [*parser.feed("<think>hm</think>yes"), *parser.end()]
    assert [(one.kind, one.text) for one in pieces] == [("reasoning", "hm"), ("content", "yes")]


def test_a_turn_knows_the_ones_before_it(text_file: Path) -> None:
    """A conversation's pages are found, those of answers, too."""
    turns = [{"role": "user", "content": LONG}]
    with open_text_model(text_file, "25%") as other:
        prefixes = open_prefixes(other, 2**24)
    with serving_file(text_file, parallel=4, prefixes=prefixes) as served:
        first = ask(served, "/v1/chat/completions", messages=turns, max_tokens=20)
        reply = first["choices"][0]["message"]["content"]
        turns += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and?"}]
        second = ask(served, "/v1/chat/completions", messages=turns, max_tokens=20)
    details = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second)]
    assert details[0] == 0 < details[1]
    assert second["choices"][0]["message"]["content"] == text_alone(text_file, turns, max_tokens=20)


def made(model: TextModel, prompt: list[int], num: int = 12, **given: Any) -> Text:
    """Return a text whose prompt is still to be read."""
    sampler = Sampler(sampling_of(model), prompt)
    return Text(model, prompt, sampler, TokenTimes(), max_new_tokens=num, **given)


def side_by_side(model: TextModel, texts: list[Text]) -> ProgramTexts:
    """Return texts that go on together."""
    together = ProgramTexts(model)
    for text in texts:
        together.add(text)
    return together


def go_on(together: ProgramTexts, until: Callable[[], bool]) -> list[Text]:
    """Advance until something holds; return the texts that are over."""
    over = list[Text]()
    for _ in range(1000):
        if until():
            return over
        over += together.advance()
    raise AssertionError("it never ends")


def alone(model: TextModel, prompt: list[int], num: int = 12) -> list[int]:
    """Return a text's tokens, with nothing beside it."""
    stream = TokenTimes()
    continue_text(model, prompt, Sampler(sampling_of(model), prompt), stream, max_new_tokens=num)
    return stream.tokens


PROMPTS = [[1, 2, 3], [5, 6, 7, 8], list(range(1, 90))]


def test_who_begins_alike_does_not_read_it_again(model: TextModel) -> None:
    """It waits for whole pages that another reads and keeps, and no longer."""
    beginning = [1 + number % 200 for number in range(300)]
    prompts = [beginning + [number] * 150 for number in (7, 8)]
    prefixes = open_prefixes(model, 2**24)
    steps, first, second, small = (
        made(model, prompt, prefixes=prefixes)
        for prompt in (PROMPTS[0], *prompts, [*beginning[:40], 9])
    )
    first.read(16)
    assert [text.will_find(first) for text in (second, small)] == [True, False]
    together = ProgramTexts(model)
    for text in (steps, second, first, small):
        together.add(text)
    go_on(together, lambda: not any(text.is_reading for text in (first, second, small)))
    assert [text.streamer.cached_tokens for text in (first, second)] == [0, 256]
    go_on(together, lambda: first.is_over and second.is_over)
    assert second.streamer.tokens == alone(model, prompts[1])
    # Where nothing would be kept there is nothing to wait for.
    none = open_prefixes(model, 1)
    first, second = (made(model, prompt, prefixes=none) for prompt in prompts)
    first.read(16)
    assert not second.will_find(first)


@pytest.mark.parametrize("counts", [(3, 4, 89), (1, 1), (20, 1), (256,), (100, 100, 56)])
@pytest.mark.parametrize("begun", [0, 5])
def test_prompts_go_through_the_model_together(
    counts: tuple[int, ...], begun: int, model: TextModel
) -> None:
    """Each row has the bits that it has alone, as have its keys and values."""
    prompts = [
        [1 + (7 * row + number) % 200 for number in range(num + begun)]
        for row, num in enumerate(counts)
    ]
    caches, apart = ([model.new_cache() for _ in counts] for _ in range(2))
    if begun:
        for cache, prompt in zip(caches, prompts, strict=True):
            model.read(prompt[:begun], cache)
    rows = model.read_together([one[begun:] for one in prompts], caches)
    for prompt, cache, row, mine in zip(prompts, apart, rows, caches, strict=True):
        assert np.array_equal(model.read(prompt, cache), row)
        one, other = (each.page(0, len(prompt)) for each in (cache, mine))
        assert all(
            np.array_equal(a, b)
            for x, y in zip(one, other, strict=True)
            for a, b in zip(x, y, strict=True)
        )


def test_short_prompts_have_their_first_tokens_at_once(model: TextModel) -> None:
    """A page's worth of them; one that fails is alone with it, one that is stopped has none."""
    texts = [made(model, prompt) for prompt in (*PROMPTS, [1 + n % 200 for n in range(300)])]
    together = side_by_side(model, texts)
    together.advance()
    assert [text.is_reading for text in texts] == [False, False, False, True]
    go_on(together, lambda: all(text.is_over for text in texts))
    for text, prompt in zip(texts, PROMPTS, strict=False):
        assert text.streamer.tokens == alone(model, prompt)

    class Full:
        """A mask that lets nothing through."""

        def allowed(self) -> np.ndarray:
            return np.zeros(model.vocabulary, bool)

        def take(self, token: int) -> None:
            raise AssertionError(token)

    masked = made(model, [9, 8], mask=Full())
    wanted, unwanted = made(model, PROMPTS[0]), made(model, PROMPTS[1])
    for text in (masked, wanted, unwanted):
        together.add(text)
    unwanted.streamer.stopped = True
    over = go_on(together, lambda: wanted.is_over)
    assert set(over) == {masked, wanted, unwanted}
    assert isinstance(masked.error, ConfigError)
    assert (unwanted.error, unwanted.streamer.tokens) == (None, [])
    assert wanted.streamer.tokens == alone(model, PROMPTS[0])


def test_a_short_prompt_does_not_have_long_ones_read_twice(model: TextModel) -> None:
    """Who begins as another one waits for it, though a short one is before both."""
    prefixes = open_prefixes(model, 2**24)
    beginning = [1 + number % 200 for number in range(300)]
    prompts = [PROMPTS[0], [*beginning, 7, 7], [*beginning, 8]]
    texts = [made(model, prompt, prefixes=prefixes) for prompt in prompts]
    together = side_by_side(model, texts)
    go_on(together, lambda: all(text.is_over for text in texts))
    assert [text.streamer.cached_tokens for text in texts] == [0, 0, 256]


def test_a_call_that_fails_at_its_end_changes_nothing(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As no memory is left for logits: texts go on alone, with their own tokens."""
    texts = [made(model, prompt) for prompt in PROMPTS]
    together = side_by_side(model, texts)
    run = TextModel._run

    def fail(self: TextModel, program: Any, num: int, *given: Any) -> None:
        run(self, program, num, *given)
        if fails[0]:
            program.abandon()  # its logits are refused then

    fails = [True]
    monkeypatch.setattr(TextModel, "_run", fail)
    with pytest.raises(ConfigError, match="logits of 1 of 0 tokens"):
        model.read_together([[1], [2]], caches := [model.new_cache() for _ in range(2)])
    assert [cache.length for cache in caches] == [0, 0]
    fails[0] = False
    broken = TextModel.read_together

    def refuse(self: TextModel, parts: Any, *given: Any) -> np.ndarray:
        fails[0] = True
        try:
            return broken(self, parts, *given)
        finally:
            fails[0] = False

    monkeypatch.setattr(TextModel, "read_together", refuse)
    go_on(together, lambda: all(text.is_over for text in texts))
    monkeypatch.undo()
    for text, prompt in zip(texts, PROMPTS, strict=True):
        assert (text.error, text.streamer.tokens) == (None, alone(model, prompt))


def test_short_prompts_that_nobody_wants_end_between_layers(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them: one that is wanted goes on."""
    wait, num_layers = TextModel._wait_for, list[int]()

    def waited(self: TextModel, number: int, *given: Any) -> None:
        num_layers.append(number)
        for text in texts:
            text.streamer.stopped = True
        wait(self, number, *given)

    texts = [made(model, prompt) for prompt in PROMPTS]
    together = side_by_side(model, texts)
    monkeypatch.setattr(TextModel, "_wait_for", waited)
    assert set(together.advance()) == set(texts)
    assert len(num_layers) == 1
    assert [(text.error, text.streamer.tokens) for text in texts] == [(None, [])] * len(texts)


def test_memory_of_a_prompt_grows_once(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is read in parts."""
    grow, sizes = TextCache._grow, list[int]()

    def noted(self: TextCache, capacity: int) -> None:
        sizes.append(capacity)
        grow(self, capacity)

    monkeypatch.setattr(TextCache, "_grow", noted)
    text = made(model, [1 + number % 200 for number in range(400)])
    text.read(100)
    text.read(300)
    assert len(sizes) == 1


def test_an_interrupt_as_pages_are_kept_loses_none(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept when the text is over."""
    prefixes = open_prefixes(model, 2**24)
    text = made(model, [1 + number % 200 for number in range(300)], prefixes=prefixes)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(prefixes), "keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            text.read(300)
    assert prefixes.stats().num_pages == 0
    text.forget()
    assert prefixes.stats().num_pages == 2


def test_what_fails_as_a_text_is_forgotten_is_of_that_text(served: Served) -> None:
    """The others go on."""
    forget, failed = Text.forget, list[Text]()

    def failing(self: Text) -> None:
        forget(self)
        if not failed:
            failed.append(self)
            raise OSError("the disk is gone")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Text, "forget", failing)
        code, message = refusal(served, "/v1/completions", prompt="a", max_tokens=4)
    assert (code, "the disk is gone" in message) == (500, True)
    assert ask(served, "/v1/completions", prompt="a", max_tokens=4)["choices"][0]["text"]


def test_an_expert_that_is_gone_ends_the_text_that_needs_it(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All caches are as they were; the others have their own tokens."""
    texts = [made(model, prompt) for prompt in PROMPTS]
    together = side_by_side(model, texts)
    go_on(together, lambda: not any(text.is_reading for text in texts))
    failing, wait, step = texts[1], TextModel._wait_for, Text.step
    num_before = len(failing.streamer.tokens)

    def fail(self: TextModel, *given: Any) -> None:
        if given[2] > 1 and failing.error is None:
            raise StoreError("an expert is gone")
        wait(self, *given)

    def step_failing(self: Text) -> None:
        if self is failing:
            raise StoreError("an expert is gone")
        step(self)

    monkeypatch.setattr(TextModel, "_wait_for", fail)
    monkeypatch.setattr(Text, "step", step_failing)
    over = go_on(together, lambda: all(text.is_over for text in texts))
    assert over[0] is failing
    assert isinstance(failing.error, StoreError)
    assert len(failing.streamer.tokens) == num_before
    monkeypatch.undo()
    for text, prompt in zip(texts, PROMPTS, strict=True):
        if text is not failing:
            assert (text.error, text.streamer.tokens) == (None, alone(model, prompt))


def test_a_text_that_nobody_wants_ends_in_its_prompt(model: TextModel) -> None:
    """And takes no more steps; what is kept of it is found."""
    prefixes = open_prefixes(model, 2**24)
    prompt = list(range(1, 200)) + list(range(1, 200))
    unwanted, other = made(model, prompt, prefixes=prefixes), made(model, PROMPTS[0])
    together = ProgramTexts(model)
    together.add(other)
    go_on(together, lambda: len(other.streamer.tokens) == 1)
    together.add(unwanted)
    together.advance()
    assert unwanted.is_reading
    unwanted.streamer.stopped = True
    assert together.advance() == [unwanted]
    assert (unwanted.error, unwanted.streamer.tokens) == (None, [])
    unwanted.forget()
    assert unwanted.cache is None
    assert prefixes.find(prompt, in_parts=True)
    go_on(together, lambda: other.is_over)
    assert other.streamer.tokens == alone(model, PROMPTS[0])


def test_what_is_no_call_is_an_error(model: TextModel) -> None:
    """Nothing has changed after it."""
    begun = model.new_cache()
    logits = model.read([1, 2, 3], begun)
    for parts, caches, error in (
        ([], [], ConfigError),
        ([[1]], [], ConfigError),
        ([[1], [2]], [begun, begun], ConfigError),
        ([[1], []], [begun, model.new_cache()], ConfigError),
        ([[1]], [begun, begun], ConfigError),
        ([[1], [2]], [begun, begun, model.new_cache()], ConfigError),
        ([[1] * 300] * 2, [model.new_cache() for _ in range(2)], ConfigError),
        ([[1] * 510], [begun], ConfigError),
        ([[10**6]], [begun], IndexError),
        ([["a"]], [begun], TypeError),
    ):
        with pytest.raises(error):
            model.read_together(parts, caches)  # type: ignore[arg-type]
    assert begun.length == 3
    token = int(logits.argmax())
    copy = model.new_cache()
    model.read([1, 2, 3], copy)
    together = model.read_together([[token], [token]], [begun, copy])
    assert np.array_equal(together[0], together[1])
    again = model.new_cache()
    model.read([1, 2, 3], again)
    assert np.array_equal(together[0], model.read([token], again))


RUN = """
import sys
from moecache.cli import main
sys.argv[:] = ["moecache", *sys.argv[1:]]
code = main(sys.argv[1:])
print("torch" in sys.modules, "transformers" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_needs_no_torch(number: int, text_file: Path) -> None:
    """It answers, shows its page, says what it did, and ends by a signal."""
    command = [sys.executable, "-c", RUN, "serve", str(text_file), "--memory", "50%", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = ""
        while "page at" not in said:
            said = process.stderr.readline()
            assert said, "it ended before it served"
        url = said.split("page at ")[1].strip()
        body = json.dumps({"prompt": "hello", "max_tokens": 4}).encode()
        with urllib.request.urlopen(f"{url}/v1/completions", body, timeout=60) as found:
            assert json.load(found)["usage"]["completion_tokens"] == 4
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as found:
            assert b"moecache" in found.read()
        os.kill(process.pid, number)
        left = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert "1 answers of 4 tokens" in left
    assert left.splitlines()[-1] == "False False"
    assert process.returncode == 0


def test_answers_in_parts_need_a_parser_of_transformers(text_file: Path, tmp_path: Path) -> None:
    """What lacks it is told before the model is there; what has it imports no torch."""
    thinking = write_text_file(tmp_path / "thinking.gguf", "{{ messages[0].content }}</think>")
    blocked = "sys.modules['transformers'] = None\n"
    for path, code in ((text_file, 0), (thinking, 1)):
        script = (
            "import sys\n"
            + blocked
            + "from moecache.cli import main\n"
            + "from moecache.serving import server\n"
            + "server.Server.wait = lambda self: None\n"
            + "sys.exit(main(sys.argv[1:]))"
        )
        done = run_child(script, "serve", path, "--memory", "50%", "--port", "0")
        assert done.returncode == code, done.stderr
        assert ("transformers' parser takes apart" in done.stderr) == bool(code)
    pytest.importorskip("transformers")
    with serving_file(thinking) as served:
        messages = [{"role": "user", "content": "hello"}]
        chat = ask(served, "/v1/chat/completions", messages=messages, max_tokens=8)
        said = chat["choices"][0]["message"]["content"]
    assert said == text_alone(thinking, messages, max_tokens=8).strip()


def test_a_model_closes_beside_its_server(text_file: Path) -> None:
    """No thread is left, and no text goes on."""
    before = set(threading.enumerate())
    with serving_file(text_file) as served:
        ask(served, "/v1/completions", prompt="hello", max_tokens=4)
    end_s = time.monotonic() + 30
    while set(threading.enumerate()) - before and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before
