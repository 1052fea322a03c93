"""`moecache chat`: a conversation, its commands, and interrupts that end no more than a reply."""

import contextlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moecache import cli
from moecache.commands.conversation import read_conversation, write_conversation
from moecache.errors import StoreError
from tests.helpers.serving import write_chat_model

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
Captured = pytest.CaptureFixture[str]
DRAWN = ("--temperature", "0.8", "--seed", "3", "--max-new-tokens", "16")
OPTIONS = ("--memory", "25%", "--compute", "fast", *DRAWN)


@pytest.fixture(name="model", scope="module")
def _model(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tiny_moe, tmp_path_factory.mktemp("chat") / "tiny")


@pytest.fixture(name="asked")
def _asked(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, str]]]:
    """Return the conversations that the model is asked to go on with, each with who said what."""
    from moecache.integrations.transformers import generation

    conversations: list[list[tuple[str, str]]] = []
    encode = generation.encode_chat

    def note(tokenizer: Any, messages: Any) -> Any:
        conversations.append([(each["role"], each["content"]) for each in messages])
        return encode(tokenizer, messages)

    monkeypatch.setattr(generation, "encode_chat", note)
    return conversations


def talk(model: Path, monkeypatch: pytest.MonkeyPatch, text: str, *options: str) -> int:
    """Run the command with lines from a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return cli.main(["chat", str(model), *OPTIONS, *options])


def test_a_reply_is_that_of_generate_and_the_next_question_comes_after_it(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    asked: list[list[tuple[str, str]]],
) -> None:
    """Until /reset; the system's message stays. Only replies are on standard output."""
    assert cli.main(["generate", str(model), "why", "--chat", *OPTIONS]) == 0
    generated = capsys.readouterr().out
    asked.clear()

    assert talk(model, monkeypatch, "why\n\nand now?\n") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(generated)
    reply = generated.removesuffix("\n")
    assert [each[0] for each in asked] == [("user", "why")] * 2
    assert asked[1][0] == ("user", "why")
    assert asked[1][1][0] == "assistant"
    assert asked[1][1][1].removesuffix("\n") == reply.removesuffix("\n")
    assert asked[1][2] == ("user", "and now?")
    assert shown.err.count("16 tokens, ") == 2

    assert talk(model, monkeypatch, "one\n/reset\ntwo\n", "--system", "Be brief.") == 0
    assert asked[-1] == [("system", "Be brief."), ("user", "two")]


def test_commands_are_obeyed_and_no_part_of_the_conversation(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    asked: list[list[tuple[str, str]]],
) -> None:
    """/stats has a line for each layer; a wrong one names the right ones."""
    assert talk(model, monkeypatch, "/stats\n/help\n/frobnicate\n") == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    for part in ("layer 7:", "Ctrl-C", "/frobnicate is none of /reset, /stats, /help"):
        assert part in shown.err
    assert asked == []


def test_a_pipe_is_no_conversation(tmp_path: Path) -> None:
    """Nobody may ever write to it."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="is no regular file"):
        read_conversation(str(tmp_path / "pipe"))


def test_a_full_disk_does_not_end_a_conversation(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    asked: list[list[tuple[str, str]]],
) -> None:
    """Nor is what was said since then lost, once there is room."""
    path, room = tmp_path / "talk.json", [True, False, True]

    def write(*given: Any) -> None:
        if not room.pop(0):
            raise StoreError(f"{path}: cannot be written: No space left on device")
        write_conversation(*given)

    monkeypatch.setattr("moecache.commands.chat.write_conversation", write)
    assert talk(model, monkeypatch, "one\ntwo\nthree\n", "--resume", str(path)) == 0
    assert "No space left on device; the conversation goes on" in capsys.readouterr().err
    assert [text for role, text in asked[-1] if role == "user"] == ["one", "two", "three"]
    assert len(read_conversation(str(path))) == 6
    room[:] = [False]
    assert talk(model, monkeypatch, "four\n", "--resume", str(path)) == 1


def test_a_conversation_goes_on_from_its_file(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    asked: list[list[tuple[str, str]]],
) -> None:
    """With the reply that it would have had; /reset empties it; another file is refused."""
    assert talk(model, monkeypatch, "why\nand now?\n") == 0
    expected = capsys.readouterr().out
    path = tmp_path / "talk.json"
    resume = ("--resume", str(path), "--prefix-cache", str(tmp_path / "pages"))
    assert talk(model, monkeypatch, "why\n", *resume) == 0
    assert talk(model, monkeypatch, "and now?\n/stats\n", *resume) == 0
    shown = capsys.readouterr()
    assert shown.out == expected
    assert "tokens known" in shown.err
    assert asked[-1] == asked[1]
    assert talk(model, monkeypatch, "/reset\n", *resume) == 0
    assert talk(model, monkeypatch, "one\n", *resume) == 0
    assert asked[-1] == [("user", "one")]

    capsys.readouterr()
    half = '{"moecache": "conversation", "messages": [{"role": "user", "content": "\\udcff"}]}'
    for wrong in (half, '{"moecache": "conversation", "messages": [1]}', "{}", "\x00", "a text"):
        path.write_text(wrong)
        assert talk(model, monkeypatch, "why\n", *resume) == 1 + (wrong[:2] != '{"')
        shown = capsys.readouterr().err
        assert str(path) in shown
        assert ("message 0 has a lone surrogate" in shown) == (wrong == half)
        assert path.read_text() == wrong


def test_a_conversation_that_goes_on_keeps_its_system_message(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    asked: list[list[tuple[str, str]]],
) -> None:
    """Another one is refused before anything is loaded, unless nothing was said after it."""
    path = tmp_path / "talk.json"
    resume = ("--resume", str(path), "--system")
    begun = {"moecache": "conversation", "messages": [{"role": "system", "content": "Rhyme."}]}
    path.write_text(json.dumps(begun))
    short = ("--max-new-tokens", "1")
    assert talk(model, monkeypatch, "why\n", *resume, "Be brief.", *short) == 0
    assert talk(model, monkeypatch, "", *resume, "Be brief.") == 0
    assert asked == [[("system", "Be brief."), ("user", "why")]]

    with_system = json.loads(path.read_text())
    without = {**with_system, "messages": with_system["messages"][1:]}
    for found, told in ((with_system, "'Be brief.'"), (without, "no system message")):
        path.write_text(json.dumps(found))
        capsys.readouterr()
        assert talk(model, monkeypatch, "", *resume, "Rhyme.") == 2
        shown = capsys.readouterr().err
        for part in (str(path), told, "leave --system out", "another file"):
            assert part in shown
        assert json.loads(path.read_text()) == found


def test_a_line_that_no_model_takes_is_told_at_once(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    asked: list[list[tuple[str, str]]],
) -> None:
    """It would take minutes to become tokens; a command with more behind it is shown whole."""
    assert talk(model, monkeypatch, f"{'x' * (2**23 + 1)}\n/reset now\n") == 0
    shown = capsys.readouterr()
    assert "a line of 8388609 characters is too long" in shown.err
    assert "/reset now is none of /reset" in shown.err
    assert asked == []


def test_a_conversation_that_is_too_long_is_told_and_goes_on(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """The question that has no room is forgotten."""
    assert talk(model, monkeypatch, f"{'x' * 2000}\nwhy\udcff\n") == 0
    shown = capsys.readouterr()
    assert "leaves no room" in shown.err
    assert "/reset begins anew" in shown.err
    assert shown.err.count("16 tokens") == 1


def test_a_model_without_a_template_is_refused_before_it_is_loaded(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """It is no chat model."""
    assert talk(tiny_moe, monkeypatch, "why\n") == 2
    assert "has no chat template" in capsys.readouterr().err


def test_bytes_that_are_no_text_are_refused_or_replaced(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Before anything is loaded where the command line has them; in a line they end nothing."""
    assert talk(model, monkeypatch, "why\n", "--system", "\udcff") == 2
    assert "--system is no UTF-8 text" in capsys.readouterr().err
    stdin = io.TextIOWrapper(io.BytesIO(b"\xe9t\xe9\n"), "utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert cli.main(["chat", str(model), *OPTIONS]) == 0
    assert "16 tokens" in capsys.readouterr().err


def test_an_interrupt_stops_the_reply_and_the_end_of_input_leaves(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal; an interrupt at the prompt says how to leave."""
    monkeypatch.setenv("TERM", "dumb")
    terminal, other = pty.openpty()
    command = [sys.executable, "-m", "moecache", "chat", str(model), *OPTIONS[:-1], "1000"]
    with subprocess.Popen(
        command, stdin=other, stdout=other, stderr=other, start_new_session=True
    ) as process:
        os.close(other)
        shown = b""

        def until(*texts: bytes, interrupt: bool = False) -> None:
            """Read until one is there, interrupting while nothing comes: one may be too early."""
            nonlocal shown
            for _ in range(600):
                for text in texts:
                    if text in shown:
                        shown = shown.partition(text)[2]
                        return
                if select.select([terminal], [], [], 0.2)[0]:
                    shown += os.read(terminal, 4096)
                elif interrupt:
                    process.send_signal(signal.SIGINT)
            process.kill()
            pytest.fail(f"there is none of {texts} in {shown!r}")

        until(b"> ")
        os.write(terminal, b"why\n")
        until(b"why\r\n")
        shown += os.read(terminal, 4096)  # the reply has begun
        process.send_signal(signal.SIGINT)
        until(b" tokens", b"is forgotten")
        until(b"> ")
        until(b"Ctrl-D leaves", interrupt=True)
        until(b"> ")
        for _ in range(5):
            process.send_signal(signal.SIGINT)
        until(b"Ctrl-D leaves", interrupt=True)
        until(b"> ")
        # Between two prompts, the terminal may take the key for another one.
        with contextlib.suppress(OSError):
            for _ in range(600):
                os.write(terminal, b"\x04")
                if select.select([terminal], [], [], 0.2)[0]:
                    os.read(terminal, 4096)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
    os.close(terminal)
