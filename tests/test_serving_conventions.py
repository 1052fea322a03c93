"""What users of llama-server and vLLM expect: tokens, properties, slots, times, names, bounds."""

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import moecache
from moecache.errors import CapacityError, ConfigError
from tests.helpers.serving import TEMPLATE, Served, serving, until, write_chat_model

for package in ("torch", "transformers", "starlette", "uvicorn"):
    pytest.importorskip(package)
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
CONTEXT = 64
TEXT = "né</s>"


@pytest.fixture(name="served", scope="module")
def _served(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_chat_model(tiny_moe, tmp_path_factory.mktemp("served") / "tiny")
    with serving(directory, compute="torch", parallel=2, context_tokens=CONTEXT) as served:
        yield served


def post(served: Served, path: str, **fields: Any) -> Any:
    """Return what is answered; of an error, its status and what is told of it."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(fields))
        answer = connection.getresponse()
        found = json.loads(answer.read())
    finally:
        connection.close()
    return found if answer.status == 200 else (answer.status, found["error"])


def test_a_text_has_the_tokens_that_the_model_reads(served: Served) -> None:
    """Special ones in it are one each; pieces that are no characters are bytes."""
    tokens = [ord("n") + 3, *(byte + 3 for byte in "é".encode()), 1]
    found = post(served, "/tokenize", content=TEXT, with_pieces=True)
    pieces: list[Any] = ["n", [0xC3], [0xA9], "</s>"]
    assert post(served, "/tokenize", content=TEXT) == {"tokens": tokens}
    assert found == {"tokens": [{"id": a, "piece": b} for a, b in zip(tokens, pieces, strict=True)]}
    assert post(served, "/detokenize", tokens=tokens) == {"content": TEXT}
    # As many as a completion counts, with what the tokenizer puts in front.
    answer = post(served, "/v1/completions", prompt="née", max_tokens=1)
    counted = post(served, "/tokenize", content="née", add_special=True)
    assert len(counted["tokens"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "text"),
    [
        ("/tokenize", {}, "content", "a string, got nothing"),
        ("/tokenize", {"content": "\ud800"}, "content", "surrogate"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special", "not supported"),
        ("/tokenize", {"content": "a", "add_special": 1}, "add_special", "true or false"),
        ("/detokenize", {"tokens": "a"}, "tokens", "a list"),
        ("/detokenize", {"tokens": [1.5]}, "tokens", "whole numbers"),
        ("/detokenize", {"tokens": [384]}, "tokens", "384 tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "384 tokens"),
    ],
)
def test_what_is_no_text_or_token_is_named(
    served: Served, path: str, fields: Any, param: str, text: str
) -> None:
    """By status 400."""
    status, error = post(served, path, **fields)
    assert (status, error["param"]) == (400, param)
    assert text in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/tokenize", 405, "/tokenize takes no GET; send POST"),
        ("POST", "/props", 405, "/props takes no POST; send "),
        ("POST", "/v1/embeddings", 404, "/v1/embeddings is not served here"),
    ],
)
def test_a_path_or_a_method_that_is_not_served_is_named(
    served: Served, method: str, path: str, status: int, text: str
) -> None:
    """In the shape of all other errors."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request(method, path)
    answer = connection.getresponse()
    error = json.loads(answer.read())["error"]
    connection.close()
    assert answer.status == status
    assert error["message"].startswith(text)
    assert error["type"] == "invalid_request_error"


def test_properties_say_what_is_served(served: Served) -> None:
    """With the defaults by which tokens are drawn."""
    found = served.get("/props")
    assert found["total_slots"] == 2
    assert found["n_ctx"] == found["default_generation_settings"]["n_ctx"] == CONTEXT
    assert found["default_generation_settings"]["params"]["temperature"] == 0.0
    assert (found["model_alias"], found["chat_template"]) == ("tiny", TEMPLATE)
    assert found["eos_token"] == "</s>"
    assert moecache.__version__ in found["build_info"]
    assert served.get("/v1/models")["data"][0]["max_model_len"] == CONTEXT


def test_slots_say_what_is_generated_in_each(served: Served) -> None:
    """The lowest place is taken first; no texts are told."""
    assert [slot["is_processing"] for slot in served.get("/slots")] == [False, False]
    threads = []
    held = threading.Event()
    step = type(served.engine.model.model).forward

    def wait(*arguments: Any, **named: Any) -> Any:
        held.wait(60)
        return step(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(served.engine.model.model), "forward", wait)
        for number in range(2):
            fields = {"prompt": "abc", "max_tokens": 5 + number, "temperature": 0.5}
            threads.append(
                threading.Thread(
                    target=post, args=(served, "/v1/completions"), kwargs={**fields, "seed": number}
                )
            )
            threads[-1].start()
            until(lambda: len(served.engine.answers) == len(threads))
        busy = served.get("/slots")
        with pytest.raises(OSError, match="503"):
            served.get("/slots?fail_on_no_slot=1")
        held.set()
        for thread in threads:
            thread.join()
    assert [slot["id"] for slot in busy] == [0, 1]
    assert [slot["is_processing"] for slot in busy] == [True, True]
    assert [slot["params"]["seed"] for slot in busy] == [0, 1]
    assert [slot["next_token"][0]["n_remain"] for slot in busy] == [5, 6]
    assert "abc" not in json.dumps(busy)
    until(lambda: not any(slot["is_processing"] for slot in served.get("/slots?fail_on_no_slot=1")))


@pytest.mark.parametrize("stream", [False, True])
def test_times_are_told_as_llama_server_tells_them(served: Served, stream: bool) -> None:
    """In the answer, or in its last part; figures agree with each other and with the usage."""
    fields = {"prompt": "abcdef", "n_predict": 7, "temperature": 0, "stream": stream}
    if stream:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(fields))
        lines = connection.getresponse().read().decode().split("\n\n")
        connection.close()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        told = chunks[-1]["timings"]
    else:
        told = post(served, "/v1/completions", **fields)["timings"]
    assert told["prompt_n"] + told["cache_n"] == 6
    assert told["predicted_n"] == 7
    assert told["predicted_per_second"] * told["predicted_ms"] == pytest.approx(6e3, rel=0.01)
    assert told["prompt_per_second"] * told["prompt_ms"] == pytest.approx(
        1e3 * told["prompt_n"], rel=0.01
    )


def test_a_prompt_and_its_answer_stay_within_the_servers_context(served: Served) -> None:
    """An answer that fills it is cut, and says so; a prompt that is as long is refused."""
    full = post(served, "/v1/completions", prompt="a" * 60, max_tokens=50, temperature=0)
    assert full["usage"]["total_tokens"] == CONTEXT
    assert full["choices"][0]["finish_reason"] == "length"
    status, error = post(served, "/v1/completions", prompt="a" * CONTEXT, max_tokens=1)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert f"the server takes {CONTEXT}" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ignore_eos", True),
        ("min_tokens", 3),
        ("stop_token_ids", [3]),
        ("mirostat", 2),
        ("dry_multiplier", 0.8),
        ("continue_final_message", True),
        ("prompt_logprobs", 1),
        ("top_n_sigma", 1.0),
    ],
)
def test_what_would_change_an_answer_and_is_not_supported_is_refused(
    served: Served, field: str, value: Any
) -> None:
    """By name, but for the values that change nothing."""
    from moecache.serving.unsupported import UNSUPPORTED

    status, error = post(served, "/v1/completions", prompt="a", max_tokens=1, **{field: value})
    assert (status, error["param"], error["code"]) == (400, field, "unsupported")
    for neutral in (*UNSUPPORTED[field], None):
        found = post(served, "/v1/completions", prompt="a", max_tokens=1, **{field: neutral})
        assert found["choices"]


def test_aliases_come_before_the_models_own_names(tmp_path: Path) -> None:
    """The first is what answers say; an empty one is refused."""
    from moecache.commands.serve import _names

    model = tmp_path / "model"
    model.mkdir()
    assert _names(str(model), "gpt-4, small") == ("gpt-4", "small", "model", str(model))
    assert _names("org/model", None) == ("org/model",)
    for wrong in ("", "a,,b", "a\nb"):
        with pytest.raises(ConfigError, match="--alias"):
            _names("org/model", wrong)


def test_a_servers_context_is_kept_free_of_experts(tiny_moe: Path) -> None:
    """`load(context_tokens=)` counts its keys and values, as `open` does."""
    from moecache.integrations.transformers import load

    load(tiny_moe, context_tokens=64).moecache.close()
    with pytest.raises(CapacityError, match="stay reserved"):
        load(tiny_moe, context_tokens=2**31 - 1)


@pytest.mark.parametrize("option", ["-c", "--ctx-size", "--max-model-len"])
def test_a_context_without_room_is_refused(option: str, capsys: Any, tiny_moe: Path) -> None:
    """Before anything is loaded."""
    from moecache import cli

    assert cli.main(["serve", str(tiny_moe), option, "1", "-np", "2"]) == 2
    assert "--ctx-size" in capsys.readouterr().err
