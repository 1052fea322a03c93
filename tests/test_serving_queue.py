"""The queue of a server: its bound comes first, and nobody waits for another's long prompt."""

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moecache.serving.requests import read_request
from tests.helpers.serving import Served, serving, until

for package in ("torch", "transformers", "starlette", "uvicorn"):
    pytest.importorskip(package)
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
BIG = "big" + "x" * 70_000
QUEUE = 2


@pytest.fixture(name="served", scope="module")
def _served(tiny_moe: Path) -> Iterator[Served]:
    with serving(tiny_moe, most_waiting=QUEUE) as served:
        yield served


class SlowTokens:
    """Makes tokens of a big text once it is let, and counts."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.may_end = threading.Event()

    def encode(self, _: Any, text: str) -> Any:
        """Return a token; in the place of `generation.encode`."""
        import torch

        if text.startswith("big"):
            self.num_begun += 1
            assert self.may_end.wait(60)
        return torch.full((1, 1), 65)


@pytest.fixture(name="slow")
def _slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowTokens]:
    from moecache.integrations.transformers import generation

    slow = SlowTokens()
    monkeypatch.setattr(generation, "encode", slow.encode)
    yield slow
    slow.may_end.set()


def asked_for(prompt: str) -> bytes:
    """Return the body of a completion."""
    return json.dumps({"prompt": prompt, "max_tokens": 1, "seed": 0}).encode()


def status_of(served: Served, prompt: str) -> int:
    """Ask for a token, and return the status of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", asked_for(prompt))
        return connection.getresponse().status


@contextlib.contextmanager
def asking(served: Served, prompt: str, times: int) -> Iterator[list[int]]:
    """Ask some times at once; give the statuses, which are complete when the block has ended."""
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(status_of(served, prompt)))
        for _ in range(times)
    ]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        for thread in threads:
            thread.join()


def test_a_small_request_does_not_wait_for_the_tokens_of_big_ones(
    served: Served, slow: SlowTokens
) -> None:
    """It is answered while they are still read."""
    with asking(served, BIG, 2) as statuses:
        until(lambda: slow.num_begun == 1)
        until(lambda: served.engine.num_waiting == 2)
        assert status_of(served, "small") == 200
        assert statuses == []
        slow.may_end.set()
    assert statuses == [200, 200]


def test_the_queue_is_full_before_any_prompt_is_read(served: Served, slow: SlowTokens) -> None:
    """One that is refused costs nothing, big or small; those that are read have their places."""
    refused = served.engine.totals.refused
    with asking(served, BIG, QUEUE + 1) as statuses:
        until(lambda: served.engine.num_waiting == QUEUE + 1)
        until(lambda: slow.num_begun == 1)
        assert status_of(served, BIG) == 503
        assert status_of(served, "small") == 503
        assert slow.num_begun == 1
        slow.may_end.set()
    assert statuses == [200] * (QUEUE + 1)
    assert served.engine.totals.refused == refused + 2
    assert served.engine.num_waiting == 0


def engine_of(tokenizer: Any, context: int, **options: Any) -> Any:
    """Return an engine that only reads: its model has a context and nothing else."""
    from moecache.integrations.transformers.served import Served
    from moecache.serving.engine import Engine

    text_config = SimpleNamespace(max_position_embeddings=context, vocab_size=1000)
    model = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: text_config),
        generation_config=SimpleNamespace(eos_token_id=1),
        moecache=SimpleNamespace(runtime=None),
    )
    return Engine(Served(model), tokenizer, ("tiny",), **options)


def test_json_is_not_read_by_the_event_loop() -> None:
    """2 MiB of it take up to 80 ms, and its checks longer: big and small ones in their threads."""
    from moecache.serving.errors import RequestError

    threads: list[str] = []

    def note(*_: Any, **__: Any) -> None:
        threads.append(threading.current_thread().name)
        raise RequestError(400, "noted")

    async def ask(body: bytes) -> None:
        gone = asyncio.get_running_loop().create_future()
        with contextlib.closing(engine_of(None, 100)) as engine:
            with pytest.raises(RequestError, match="noted"):
                await engine.read(body, note, gone=gone)
            assert engine.num_waiting == 0

    for body in (b"{}", b" " * 100_000):
        asyncio.run(ask(body))
    assert threads == ["moecache-read-small_0", "moecache-read-big_0"]


def test_a_prompt_whose_client_has_left_is_not_read(slow: SlowTokens) -> None:
    """Its place is free at once; a read that has begun keeps nobody from leaving."""

    async def leave() -> None:
        loop = asyncio.get_running_loop()
        with contextlib.closing(engine_of(None, 100)) as engine:
            clients = [loop.create_future() for _ in range(2)]
            body = asked_for(BIG)
            reads = [
                asyncio.ensure_future(
                    engine.read(body, partial(read_request, chat=False), gone=gone)
                )
                for gone in clients
            ]
            await asyncio.to_thread(until, lambda: slow.num_begun == 1)
            assert engine.num_waiting == 2
            for gone, read in zip(reversed(clients), reversed(reads), strict=True):
                gone.set_result(None)
                assert await read is None
            assert engine.num_waiting == 0
            assert engine.totals.left == 2
            slow.may_end.set()
        assert slow.num_begun == 1

    asyncio.run(leave())


def test_a_server_that_ends_waits_for_no_prompt(slow: SlowTokens) -> None:
    """Those that are read are refused as those that wait are."""
    from moecache.serving.errors import RequestError

    async def end() -> None:
        gone = asyncio.get_running_loop().create_future()
        with contextlib.closing(engine_of(None, 100)) as engine:
            read = asyncio.ensure_future(
                engine.read(asked_for(BIG), partial(read_request, chat=False), gone=gone)
            )
            await asyncio.to_thread(until, lambda: slow.num_begun == 1)
            engine.drain()
            with pytest.raises(RequestError, match="the server ends") as refused:
                await read
            assert (refused.value.status, engine.totals.refused) == (503, 1)
            with pytest.raises(RequestError, match="the server ends"):
                await engine.read(asked_for("small"), partial(read_request, chat=False), gone=gone)
            slow.may_end.set()

    asyncio.run(end())


@pytest.mark.parametrize("chat", [True, False])
def test_a_prompt_that_cannot_fit_is_refused_without_its_tokens(
    monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    """What the template leaves out does not count: the same length may fit."""
    from moecache.integrations.transformers import generation
    from moecache.serving.errors import RequestError
    from tests.test_transformers_token_bound import byte_level

    tokenizer = byte_level()
    tokenizer.chat_template = "{{ messages[-1].content }}"
    encoded: list[str] = []

    def note(_: Any, given: Any, *_more: Any) -> Any:
        import torch

        encoded.append(given)
        return torch.full((1, 1), 65)

    monkeypatch.setattr(generation, "encode_chat", note)
    monkeypatch.setattr(generation, "encode", note)

    def body(first: str, last: str) -> bytes:
        if not chat:
            return json.dumps({"prompt": last}).encode()
        contents = [{"role": "user", "content": content} for content in (first, last)]
        return json.dumps({"messages": contents}).encode()

    async def ask(data: bytes) -> Any:
        gone = asyncio.get_running_loop().create_future()
        with contextlib.closing(engine_of(tokenizer, 1000)) as engine:
            return await engine.read(data, partial(read_request, chat=chat), gone=gone)

    with pytest.raises(RequestError, match=r"at least [0-9]+ tokens leaves no room") as refused:
        asyncio.run(ask(body("", BIG)))
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert encoded == []
    assert asyncio.run(ask(body(BIG, "!" * 70_000 + "short"))) is not None
    assert len(encoded) == 1
