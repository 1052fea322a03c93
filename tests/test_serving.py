"""`moecache serve` with the real client of OpenAI: what is answered is what `generate` says."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moecache import cli
from tests.helpers.serving import Served, serving, until, write_chat_model

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

QUESTION = "def main(argv=None):"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
NUM_TOKENS = 24
DRAWN: Any = {"temperature": 0.8, "seed": 3}


@pytest.fixture(name="served", scope="module")
def _served(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_chat_model(tiny_moe, tmp_path_factory.mktemp("served") / "tiny")
    with serving(directory, most_waiting=2) as served:
        yield served


@pytest.fixture(name="generated", scope="module")
def _generated(served: Served) -> Any:
    """Return what `moecache generate` prints."""

    def generate(*options: str) -> str:
        import io
        from contextlib import redirect_stdout

        few = ("--memory", "25%", "--compute", "fast", "--temperature", "0.8", "--seed", "3")
        with redirect_stdout(io.StringIO()) as shown:
            assert cli.main(["generate", str(served.directory), QUESTION, *few, *options]) == 0
        return shown.getvalue().removesuffix("\n")

    return generate


@pytest.fixture(name="answer", scope="module")
def _answer(generated: Any) -> str:
    """Return the model's answer to the question."""
    return str(generated("--chat", "--max-new-tokens", str(NUM_TOKENS)))


def chat(client: Any, **options: Any) -> Any:
    """Ask the question."""
    options = {"max_tokens": NUM_TOKENS, **DRAWN, **options}
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **options)


def sent(served: Served, **options: Any) -> socket.socket:
    """Return a connection that has asked for an answer in one."""
    body = json.dumps({"messages": MESSAGES, **DRAWN, **options}).encode()
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    return connection


def test_a_chat_is_answered_as_generate_answers_it(client: Any, answer: str) -> None:
    """With the same seed; usage counts the template's tokens, too."""
    found = chat(client)

    assert found.choices[0].message.content.rstrip("\n") == answer.rstrip("\n")
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == NUM_TOKENS
    assert found.usage.prompt_tokens == len(f"user: {QUESTION}\nassistant:")
    assert found.usage.total_tokens == found.usage.prompt_tokens + NUM_TOKENS


def test_a_streamed_answer_is_the_whole_one_in_parts(client: Any, answer: str) -> None:
    """The first part has the role, the last the reason and what it took, then comes the usage."""
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))

    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts).rstrip("\n") == answer.rstrip("\n")
    assert len(texts) > 10
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage.completion_tokens == NUM_TOKENS
    last = chunks[-2]
    assert last.choices[0].finish_reason == "length"
    assert last.moecache["seed"] == DRAWN["seed"]
    assert last.moecache["bytes_read"] > 0
    assert last.moecache["waited_s"] >= 0


def test_a_completion_continues_the_text_and_has_16_tokens_if_none_are_named(
    client: Any, generated: Any
) -> None:
    """Without a template; in parts, too."""
    expected = generated("--max-new-tokens", "16").rstrip("\n")
    asked = {"model": "tiny", "prompt": QUESTION, **DRAWN}

    found = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))

    assert found.choices[0].text.rstrip("\n") == expected
    assert "".join(chunk.choices[0].text for chunk in chunks).rstrip("\n") == expected
    assert found.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_stop_string(client: Any, answer: str, stream: bool) -> None:
    """Also before one of several tokens; nothing of it is shown, and no further token drawn."""
    stop = answer[5:8]
    expected = answer[: answer.index(stop)]

    found = chat(client, stop=["never there", stop], stream=stream)

    if stream:
        chunks = list(found)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = found.choices[0].message.content, found.choices[0].finish_reason
        assert found.usage.completion_tokens == len(expected + stop)
    assert text == expected
    assert reason == "stop"


def test_temperature_0_needs_no_seed(client: Any) -> None:
    """Drawn without a seed, the answer says the one that gives it again."""
    texts = {chat(client, temperature=0, seed=None).choices[0].message.content for _ in range(2)}
    assert len(texts) == 1

    drawn = chat(client, seed=None, top_p=0.9)
    again = chat(client, seed=drawn.moecache["seed"], top_p=0.9)
    assert again.choices[0].message.content == drawn.choices[0].message.content


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1])
def test_any_seed_of_64_bits_is_taken_by_server_and_command_line(
    client: Any, generated: Any, seed: int
) -> None:
    """And gives the same text in both."""
    expected = generated("--chat", "--max-new-tokens", str(NUM_TOKENS), "--seed", str(seed))
    found = chat(client, seed=seed)
    assert found.choices[0].message.content.rstrip("\n") == expected.rstrip("\n")
    assert found.moecache["seed"] == seed


def test_a_token_that_ends_the_text_is_the_reason_stop(served: Served, client: Any) -> None:
    """Even as the last of as many as were asked for; it is no text."""
    config = served.engine.model.model.generation_config
    before, config.eos_token_id = config.eos_token_id, [ord(" ") + 3, 1]
    try:
        found = chat(client)
        asked = found.usage.completion_tokens
        exact = chat(client, max_tokens=asked)
    finally:
        config.eos_token_id = before
    assert asked < NUM_TOKENS
    assert found.choices[0].finish_reason == exact.choices[0].finish_reason == "stop"


def test_requests_are_answered_one_after_another_and_those_beyond_the_queue_refused(
    served: Served, client: Any
) -> None:
    """503 says when to ask again; every answer is the one of its own seed."""
    running = chat(client, stream=True, max_tokens=900)
    next(iter(running))
    texts: dict[int, str] = {}

    def ask(seed: int) -> None:
        texts[seed] = chat(client, seed=seed).choices[0].message.content

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in (3, 4)]
    for thread in threads:
        thread.start()
    until(lambda: served.get("/health")["waiting"] == 2)
    with pytest.raises(openai.APIStatusError) as refused:
        chat(client)
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["Retry-After"]) >= 1
    assert refused.value.body["code"] == "queue_full"

    running.close()
    for thread in threads:
        thread.join()
    alone = {seed: chat(client, seed=seed).choices[0].message.content for seed in (3, 4)}
    assert texts == alone
    assert texts[3] != texts[4]


def test_a_client_that_leaves_ends_its_generation(served: Served, client: Any) -> None:
    """Streamed or not, generated or waiting; no slot stays leased, and the next is answered."""
    totals = served.engine.totals
    left, answered = totals.left, totals.answered

    streamed = chat(client, stream=True, max_tokens=900)
    next(iter(streamed))
    with sent(served, max_tokens=900), sent(served, max_tokens=900) as second:
        until(lambda: served.engine.num_waiting == 2)
        second.close()
        until(lambda: totals.left == left + 1)
        streamed.close()
        until(lambda: totals.left == left + 2)
        until(lambda: served.engine.answer is not None)  # the first of those that waited
    until(lambda: totals.left == left + 3)

    assert chat(client).usage.completion_tokens == NUM_TOKENS
    assert totals.answered == answered + 1
    until(lambda: served.engine.answer is None)
    assert not (served.engine.runtime.cache.expert_states() & 4).any()
    served.engine.runtime.cache.check()


def test_a_generation_that_is_stopped_ends_within_its_prompt(served: Served) -> None:
    """Before the next layer's experts are asked for: a long prompt takes minutes."""
    import torch

    from moecache.decoding import streams
    from moecache.integrations.transformers import generation

    model = served.engine.model.model
    prompt = torch.arange(40, 240)[None]
    stream = streams.TokenTimes()
    with generation.check_between_layers(model, stream):
        third = model.get_submodule(model.moecache.paths[2])
        hook = third.register_forward_hook(lambda *_: setattr(stream, "stopped", True))
        before = served.engine.runtime.stats()
        generation.continue_tokens(model, prompt, stream, max_new_tokens=5)
        hook.remove()
    assert (served.engine.runtime.stats() - before).num_steps == 3
    assert stream.tokens == []
    assert not any(model.get_submodule(path)._forward_pre_hooks for path in model.moecache.paths)


def test_each_request_begins_a_sequence(served: Served, client: Any) -> None:
    """The policy is not told that two conversations are one."""
    before = served.engine.runtime.stats().num_sequences
    for _ in range(2):
        chat(client, max_tokens=2)
    assert served.engine.runtime.stats().num_sequences == before + 2


def test_a_model_that_fails_is_an_error_and_the_next_request_is_answered(
    served: Served, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 500, or an event where the answer has begun."""
    from moecache.decoding.text import Text
    from moecache.errors import StoreError

    def fail(*_: Any, **__: Any) -> None:
        raise StoreError('the "disk" is gone')

    with monkeypatch.context() as patched:
        patched.setattr(Text, "read", fail)
        with pytest.raises(openai.InternalServerError, match="disk"):
            chat(client)
        with pytest.raises(openai.APIError, match="disk"):
            list(chat(client, stream=True))
    assert chat(client).choices[0].message.content


def test_the_state_is_what_the_runtime_says(served: Served, client: Any) -> None:
    """A byte per expert, how often each was used, and the counters."""
    import base64

    import numpy as np

    chat(client, max_tokens=3)
    until(lambda: served.engine.answer is None)
    state = served.get("/v1/moecache/state")

    cache, stats = served.engine.runtime.cache, served.engine.runtime.stats()
    states = np.frombuffer(base64.b64decode(state["states"]), np.uint8)
    uses = np.frombuffer(base64.b64decode(state["uses"]), "<u4")
    assert (state["num_layers"], state["num_experts"]) == (8, 32)
    assert states.reshape(8, 32).tolist() == cache.expert_states().tolist()
    assert uses.reshape(8, 32).tolist() == cache.profiler.counts.tolist()
    assert state["num_resident"] == stats.num_resident == int((states & 1).sum())
    assert state["num_tokens"] == served.engine.totals.completion_tokens
    assert state["generating"] is None


def test_models_health_and_metrics_are_served(served: Served, client: Any) -> None:
    """The model's name is its directory's; metrics are those of runtime and server."""
    from moecache.commands.metrics import read_metrics

    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")
    assert served.get("/health") == {"status": "ok", "waiting": 0}
    assert read_metrics(f"{served.url}/metrics").counts["hits"] > 0
