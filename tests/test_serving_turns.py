"""Whose answer is generated: as many as may be, in order, as far as there is memory."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from moecache.serving.errors import RequestError

for package in ("torch", "transformers", "starlette"):
    pytest.importorskip(package)

Body = Callable[[Any], Coroutine[Any, Any, None]]


def run(monkeypatch: pytest.MonkeyPatch, body: Body, *, most: int = 3, free: int = 100) -> None:
    """Run something with turns of a model whose tokens take a byte each."""
    from moecache.serving import turns

    monkeypatch.setattr(turns, "_LOOK_S", 0.001)

    async def with_turns() -> None:
        model = SimpleNamespace(free=free, bytes_per_token=1)
        borrowed = SimpleNamespace(room_bytes=lambda: model.free)
        model.runtime = SimpleNamespace(borrowed=borrowed)
        made = turns.Turns(model, most)
        await body(SimpleNamespace(model=model, turns=made, wait=_wait(made)))

    asyncio.run(with_turns())


def _wait(turns: Any) -> Callable[[int], Any]:
    def wait(num_tokens: int) -> Any:
        gone = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(turns.take(num_tokens, gone))
        return SimpleNamespace(task=task, gone=gone)

    return wait


def answer(read: int = 0, num_tokens: int = 0) -> Any:
    """Return what stands for an answer."""
    return SimpleNamespace(stream=SimpleNamespace(read_tokens=read, tokens=[0] * num_tokens))


async def settled(*waits: Any) -> list[bool]:
    """Return which of some have their turn, once nothing more happens."""
    for _ in range(5):
        await asyncio.sleep(0)
    return [wait.task.done() for wait in waits]


def test_turns_come_in_order_and_no_more_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends passes its turn on."""

    async def body(house: Any) -> None:
        waits = [house.wait(10) for _ in range(5)]
        assert await settled(*waits) == [True, True, True, False, False]
        assert (house.turns.num_waiting, house.turns.num_free) == (2, 0)
        first = waits[0].task.result()
        first.answer = answer()
        assert house.turns.answers == (first.answer,)
        house.turns.end(first.answer)
        assert await settled(*waits) == [True] * 4 + [False]
        assert house.turns.refuse(RequestError(503, "the server ends")) == 1
        with pytest.raises(RequestError, match="the server ends"):
            await waits[4].task

    run(monkeypatch, body)


def test_a_request_waits_for_memory_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they have written is not free any more; nobody overtakes; one alone goes in any case."""

    async def body(house: Any) -> None:
        waits = [house.wait(500), house.wait(60), house.wait(1)]
        assert await settled(*waits) == [True, False, False]
        assert house.turns.num_free == 0
        first = waits[0].task.result()
        first.answer = answer(read=400, num_tokens=90)
        house.model.free = 69
        fourth = house.wait(1)
        # 60 and the 10 that are still to be written: one too many.
        assert await settled(*waits, fourth) == [True, False, False, False]
        house.model.free = 200
        house.turns.end(first.answer)
        assert await settled(*waits, fourth) == [True] * 4

    run(monkeypatch, body)


def test_memory_that_comes_free_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the end of an answer; what is promised to a prefix cache is not free."""

    async def body(house: Any) -> None:
        waits = [house.wait(10), house.wait(50)]
        assert await settled(*waits) == [True, True]
        house.turns._prefixes = SimpleNamespace(
            max_bytes=80, stats=lambda: SimpleNamespace(nbytes=20)
        )
        third = house.wait(20)
        await asyncio.sleep(0.01)
        # 20 and the others' 60 of 100 less 60.
        assert not third.task.done()
        house.model.free = 140
        await asyncio.wait_for(third.task, 10)

    run(monkeypatch, body)


def test_what_fails_leaves_no_turn_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is its own, and the next one has its turn."""
    from moecache.serving import turns

    async def body(house: Any) -> None:
        first = house.wait(1)
        assert await settled(first) == [True]

        def fail(*_: Any) -> bool:
            raise OSError("no such file")

        with monkeypatch.context() as patched:
            patched.setattr(turns.Turns, "_fits", fail)
            second = house.wait(1)
            await settled(second)
            with pytest.raises(OSError, match="no such file"):
                await second.task
        assert (house.turns.num_waiting, house.turns.num_free) == (0, 2)
        third = house.wait(1)
        assert await settled(third) == [True]
        house.turns.give_up(third.task.result())
        assert house.turns.num_free == 2

    run(monkeypatch, body)


def test_who_leaves_takes_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the queue, before it, and when its turn has come in the same moment."""

    async def body(house: Any) -> None:
        waits = [house.wait(1) for _ in range(3)]
        assert await settled(*waits) == [True, False, False]
        waits[1].gone.set_result(None)
        assert await settled(*waits) == [True, True, False]
        assert waits[1].task.result() is None
        first = waits[0].task.result()
        first.answer = answer()
        # Its turn comes while it leaves.
        waits[2].gone.set_result(None)
        house.turns.end(first.answer)
        assert await waits[2].task is None
        left = house.wait(1)
        left.gone.set_result(None)
        assert await left.task is None
        cancelled, last = house.wait(1), house.wait(1)
        assert await settled(cancelled, last) == [True, False]
        last.task.cancel()
        await settled(last)
        assert (house.turns.num_waiting, house.turns.num_free) == (0, 0)

    run(monkeypatch, body, most=1)
