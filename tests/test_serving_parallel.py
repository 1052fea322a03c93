"""Several answers at a time: each is the one it is alone, and its end is its own."""

import contextlib
import http.client
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moecache import cli
from moecache.errors import ConfigError, StoreError
from tests.helpers.offloading import load_in_slots
from tests.helpers.serving import Served, serving, until

for package in ("torch", "transformers", "starlette", "uvicorn"):
    pytest.importorskip(package)
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
# The second is read in pages, and its last tokens are so few that they are decoded.
LENGTHS = (5, 256 + 9, 17, 2)
NUM_TOKENS = 9


@pytest.fixture(name="model", scope="module")
def _model(qwen3_moe: Path) -> Any:
    """Return a model whose prompts go through its modules, in pages."""
    from moecache.integrations.transformers import _current

    model = load_in_slots(qwen3_moe, compute="fast")
    with model.moecache, pytest.MonkeyPatch.context() as patched:
        patched.setattr(_current, "_reads_prompts", lambda *_: False)
        yield model


def make(
    model: Any, row: int, *, events: list[Any] | None = None, length: int = 0, mask: Any = None
) -> tuple[Any, list[np.ndarray]]:
    """Return a text, drawn with a seed or without, and the logits that its tokens are drawn of."""
    from moecache.decoding.sampler import Sampler, Sampling
    from moecache.decoding.streams import TokenTimes
    from moecache.integrations.transformers.continuing import Text

    seen: list[np.ndarray] = []
    noted: list[Any] = [] if events is None else events

    class Noting(Sampler):
        def draw(self, logits: np.ndarray, mask: np.ndarray | None = None) -> int:
            seen.append(logits.copy())
            return super().draw(logits, mask)

    class Stream(TokenTimes):
        def take(self, tokens: list[int]) -> None:
            noted.append((row, "token"))

        def read(self, num_tokens: int) -> None:
            if num_tokens % 256 == 0 or num_tokens == len(prompt):
                noted.append((row, num_tokens))
            super().read(num_tokens)

    prompt = [(row + 2) * place % 90 + 3 for place in range(length or LENGTHS[row])]
    sampler = Noting(Sampling(temperature=row % 2 * 0.8, seed=row))
    text = Text(model, prompt, sampler, Stream(), max_new_tokens=NUM_TOKENS + row, mask=mask)
    return text, seen


def go_on(together: Any, texts: Sequence[Any], until: Callable[[], bool] = lambda: False) -> None:
    """Go on until all texts are over, or something holds."""
    left = set(texts)
    for _ in range(200):
        left -= set(together.advance())
        if (texts and not left) or until():
            return
    raise AssertionError("texts do not end")


def alone(model: Any, row: int) -> tuple[list[int], list[np.ndarray]]:
    """Return a text's tokens and logits, generated with nothing else."""
    from moecache.integrations.transformers.together import Together

    text, seen = make(model, row)
    together = Together(model)
    together.add(text)
    go_on(together, [text])
    assert text.error is None
    return text.streamer.tokens, seen


def assert_as_alone(model: Any, rows: dict[int, tuple[Any, list[np.ndarray]]]) -> None:
    """Compare texts with those that are generated alone, bit for bit."""
    for row, (text, seen) in rows.items():
        assert text.error is None
        tokens, logits = alone(model, row)
        assert text.streamer.tokens == tokens, row
        assert np.array_equal(seen, logits), row


def test_texts_have_the_tokens_that_they_have_alone(model: Any) -> None:
    """Begun one after another, with seeds and without; most tokens come from common calls."""
    from moecache.integrations.transformers.together import Together

    together, rows = Together(model), {}
    before = model.moecache.decoder.num_steps
    for row in range(4):
        rows[row] = make(model, row)
        together.add(rows[row][0])
        together.advance()
    go_on(together, [text for text, _ in rows.values()])
    num_tokens = sum(len(text.streamer.tokens) for text, _ in rows.values())
    assert num_tokens == sum(NUM_TOKENS + row for row in range(4))
    assert model.moecache.decoder.num_steps - before < num_tokens / 2
    assert_as_alone(model, rows)


def test_a_long_prompt_stops_others_for_a_page_at_most(model: Any) -> None:
    """Alone it is read in spans, as an expert is read once for them."""
    from moecache.integrations.transformers.together import Together

    events: list[Any] = []
    together, short = Together(model), make(model, 3, events=events)[0]
    long = make(model, 1, events=events, length=600)[0]
    together.add(short)
    together.advance()
    together.add(long)
    go_on(together, [short, long], until=lambda: not long.is_reading)
    assert events[:2] == [(3, 2), (3, "token")]
    reads = [place for place, event in enumerate(events) if event[0] == 1 and event[1] != "token"]
    assert [events[place][1] for place in reads] == [256, 512, 600]
    assert all((3, "token") in events[a:b] for a, b in itertools.pairwise(reads))
    events.clear()
    long = make(model, 1, events=events, length=600)[0]
    together = Together(model)
    together.add(long)
    go_on(together, [long], until=lambda: not long.is_reading)
    assert events == [(1, 600), (1, "token")]


def test_an_error_ends_the_text_that_it_is_of(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that lets nothing through; an expert that only one text needs."""
    from moecache.integrations.transformers.continuing import Text
    from moecache.integrations.transformers.together import Together

    nothing = SimpleNamespace(allowed=lambda: np.zeros(500, bool), take=None)
    masked, rows = make(model, 2, mask=nothing)[0], {row: make(model, row) for row in (0, 3)}
    failing, _ = make(model, 1, length=4)
    together, texts = Together(model), [text for text, _ in rows.values()]
    for text in (*texts, masked, failing):
        together.add(text)
    go_on(together, [masked])
    assert isinstance(masked.error, ConfigError)
    go_on(together, [failing], until=lambda: len(failing.streamer.tokens) == 2)
    runtime, step, is_alone = model.moecache.runtime, Text.step, []
    waves = type(runtime).waves

    def fail(self: Any, layer: int, ids: Any, **named: Any) -> Any:
        # Reads of all fail while this text takes part.
        if is_alone != [False] and layer == 1 and failing.error is None:
            raise StoreError("an expert is gone")
        return waves(self, layer, ids, **named)

    def take_alone(self: Any) -> None:
        is_alone[:] = [self is failing]
        if self is failing:
            raise StoreError("an expert is gone")
        step(self)
        is_alone.clear()

    monkeypatch.setattr(type(runtime), "waves", fail)
    monkeypatch.setattr(Text, "step", take_alone)
    go_on(together, [failing])
    assert isinstance(failing.error, StoreError)
    assert len(failing.streamer.tokens) == 2
    monkeypatch.undo()
    go_on(together, texts)
    assert_as_alone(model, rows)


def test_a_text_that_nobody_wants_any_more_leaves_the_others_alone(model: Any) -> None:
    """While it is read, too; its memory goes."""
    import weakref

    from moecache.integrations.transformers.together import Together

    together, rows = Together(model), {row: make(model, row) for row in (0, 3)}
    unwanted = [make(model, 2)[0], make(model, 1, length=600)[0]]
    for text in (unwanted[0], *(text for text, _ in rows.values())):
        together.add(text)
    go_on(together, [], until=lambda: len(unwanted[0].streamer.tokens) == 2)
    together.add(unwanted[1])
    together.advance()
    for text in unwanted:
        text.streamer.stopped = True
    assert set(together.advance()) == set(unwanted)
    assert [text.error for text in unwanted] == [None, None]
    assert [len(text.streamer.tokens) for text in unwanted] == [3, 0]
    gone = weakref.ref(unwanted.pop(0).cache)
    del text
    assert gone() is None
    go_on(together, [text for text, _ in rows.values()])
    assert_as_alone(model, rows)


@pytest.fixture(name="served", scope="module")
def _served(tiny_moe: Path) -> Iterator[Served]:
    with serving(tiny_moe, most_waiting=1, parallel=3) as served:
        yield served


def ask(served: Served, answers: dict[int, Any], seed: int, num_tokens: int) -> None:
    """Ask for a completion, and keep status and text."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    body = {"prompt": "Once there was " * (seed + 1), "temperature": 0.9, "seed": seed}
    with contextlib.closing(connection):
        connection.request(
            "POST", "/v1/completions", json.dumps({**body, "max_tokens": num_tokens})
        )
        answer = connection.getresponse()
        found = json.loads(answer.read())
        answers[seed] = found["choices"][0]["text"] if answer.status == 200 else answer.status


@contextlib.contextmanager
def asking(served: Served, num: int, num_tokens: int) -> Iterator[dict[int, Any]]:
    """Ask for some answers at once; give them, complete when the block has ended."""
    answers: dict[int, Any] = {}
    threads = [
        threading.Thread(target=ask, args=(served, answers, seed, num_tokens))
        for seed in range(num)
    ]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        for thread in threads:
            thread.join()


def test_as_many_are_answered_at_a_time_as_may_be(served: Served) -> None:
    """The next one waits, one more is refused; the texts are those of one after another."""
    with asking(served, 4, 30) as answers:
        until(lambda: len(served.engine.answers) == 3 and served.engine.num_waiting == 1)
        state = served.get("/v1/moecache/state")
        assert (state["num_generating"], state["parallel"]) == (3, 3)
        refused: dict[int, Any] = {}
        ask(served, refused, 9, 1)
        assert refused == {9: 503}
    expected: dict[int, Any] = {}
    for seed in range(4):
        ask(served, expected, seed, 30)
    assert answers == expected
    assert len(set(answers.values())) == 4
    until(lambda: not served.engine.answers)
    assert served.get("/v1/moecache/state")["num_generating"] == 0


def test_a_client_that_leaves_ends_its_answer_alone(served: Served) -> None:
    """The others are whole, and nothing stays leased."""
    totals = served.engine.totals
    left = totals.left
    body = json.dumps({"prompt": "A", "max_tokens": 900, "stream": True})
    leaving = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    leaving.request("POST", "/v1/completions", body)
    leaving.getresponse().read(10)
    with asking(served, 2, 16) as answers:
        until(lambda: len(served.engine.answers) == 3)
        leaving.close()
        until(lambda: totals.left == left + 1)
    expected: dict[int, Any] = {}
    for seed in range(2):
        ask(served, expected, seed, 16)
    assert answers == expected
    until(lambda: not served.engine.answers)
    assert not (served.engine.runtime.cache.expert_states() & 4).any()


def test_a_server_that_is_cut_off_ends_all_answers(tiny_moe: Path) -> None:
    """Each client is told; the thread has ended."""
    with serving(tiny_moe, parallel=2) as served:
        with asking(served, 2, 900) as answers:
            until(lambda: len(served.engine.answers) == 2)
            served.server.should_exit = served.server.force_exit = True
        assert answers == {0: 503, 1: 503}
        assert served.engine.totals.failed == 2
    assert not any(thread.is_alive() for thread in served.engine._generating._thread._threads)


def test_a_model_without_a_recipe_answers_one_at_a_time(model: Any) -> None:
    """And says why."""
    from moecache.integrations.transformers.served import Served as ByTorch

    assert ByTorch(model).why_alone == ""
    hook = model.model.layers[1].self_attn.register_forward_hook(lambda *_: None)
    assert "has hooks" in ByTorch(model).why_alone
    hook.remove()
    until(lambda: ByTorch(model).why_alone == "")


def test_how_many_at_a_time_is_checked_before_anything_is_loaded(
    tiny_moe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2."""
    for number in ("0", "17"):
        assert cli.main(["serve", str(tiny_moe), "--parallel", number]) == 2
        assert f"--parallel must be from 1 to 16, got {number}" in capsys.readouterr().err


def test_a_text_whose_client_left_before_it_began_is_no_error(model: Any) -> None:
    """It waited among others' jobs meanwhile; the next one begins."""
    from moecache.decoding.streams import Stopped
    from moecache.integrations.transformers.served import Served as ByTorch
    from moecache.serving.generating import Generating

    class Left:
        def begin(self) -> Any:
            raise Stopped

        def end(self) -> None:
            pytest.fail("nothing was generated")

        run = end

    with contextlib.closing(Generating(ByTorch(model))) as generating:
        assert [generating.submit(Left()).result(60) for _ in range(2)] == [None, None]


def test_an_ended_text_has_given_its_memory_back(model: Any) -> None:
    """Before anybody is told of its end: the next one's turn comes by what is free."""
    from moecache.integrations.transformers.served import Served as ByTorch
    from moecache.serving.generating import Generating

    text, _ = make(model, 3)
    seen: list[int] = []
    job = SimpleNamespace(
        begin=lambda: text,
        end=lambda: seen.append(text.cache.get_seq_length()),
        run=None,
    )
    with contextlib.closing(Generating(ByTorch(model))) as generating:
        generating.submit(job).result(60)
    assert seen == [0]
    assert len(text.streamer.tokens) == NUM_TOKENS + 3
