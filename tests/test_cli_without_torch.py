"""`moecache generate` and `chat` of a GGUF file, without torch."""

import errno
import gc
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache import cli
from moecache.commands.conversation import read_conversation
from moecache.decoding.files import continuing, opening, trunk
from moecache.decoding.files.model import TextModel
from moecache.decoding.files.opening import open_text_model
from moecache.decoding.gguf import tokenizer
from moecache.decoding.prefixes import PrefixCache
from moecache.decoding.sampler import Sampler, Sampling
from moecache.decoding.streams import TextStream
from moecache.stores import open_store
from tests.helpers.gguf_texts import write_text_file
from tests.helpers.leaks import nothing_left
from tests.helpers.pages import run_child
from tests.helpers.without_torch import RUN, greedy_text

pytest.importorskip("gguf")
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(name="text_file", scope="module")
def _text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a quantized file with a tokenizer."""
    return write_text_file(tmp_path_factory.mktemp("text") / "model.gguf")


def test_generate_writes_a_text_without_torch(text_file: Path) -> None:
    """The model's own text; the summary and the exit code are those of torch's way."""
    from moecache.decoding.gguf.tokenizer import read_tokenizer

    with open_text_model(text_file, "50%") as model:
        tokenizer = read_tokenizer(model.runtime.store.metadata)
        text = greedy_text(model, tokenizer, "hello, world", 8)
    options = ["--memory", "50%", "--max-new-tokens", "8"]
    done = run_child(RUN, "generate", text_file, "hello, world", *options)
    assert done.returncode == 0, done.stderr
    chat = run_child(RUN, "generate", text_file, "hello", "--chat", *options)
    assert chat.stdout == done.stdout
    assert done.stdout.rstrip("\n") == text
    assert "8 tokens, " in done.stderr
    assert done.stderr.splitlines()[-1] == "False False"


def test_generate_draws_as_torchs_way_does(text_file: Path) -> None:
    """A seed has the same draws; a trace is recorded."""
    options = ["--memory", "50%", "--max-new-tokens", "8", "--temperature", "0.7", "--stats"]
    trace = text_file.with_suffix(".npz")
    first, again, other = (
        run_child(RUN, "generate", text_file, "hello", *options, "--seed", seed, *more)
        for seed, more in (("3", ["--record-trace", trace]), ("3", []), ("4", []))
    )
    assert first.returncode == again.returncode == other.returncode == 0, first.stderr
    assert first.stdout == again.stdout != other.stdout
    assert trace.stat().st_size


def test_chat_talks_without_torch(text_file: Path, tmp_path: Path) -> None:
    """Each reply is what the model says after all messages; what was read is not read again."""
    talk = tmp_path / "talk.json"
    options = ["--memory", "50%", "--max-new-tokens", "24", "--temperature", "0.8"]
    kept = ["--prefix-cache", tmp_path / "pages", "--resume", talk]
    lines = f"{'hello ' * 20}\n/stats\nworld\n"
    done = run_child(RUN, "chat", text_file, *options, *kept, stdin=lines)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "False False"
    assert "tokens are one call each, without torch" in done.stderr
    messages = read_conversation(talk)
    assert messages is not None
    assert [one["role"] for one in messages] == ["user", "assistant", "user", "assistant"]
    with open_text_model(text_file, "25%") as model:
        said = tokenizer.read_tokenizer(model.runtime.store.metadata)
        for end in (1, 3):
            ids, parts = said.encode_chat(messages[:end]), list[str]()
            stream = TextStream(said, np.array([ids]), parts.append)
            sampler = Sampler(Sampling(temperature=0.8, top_k=50, seed=0), ids)
            continuing.continue_text(model, ids, sampler, stream, max_new_tokens=24)
            assert "".join(parts) == messages[end]["content"]
    # The second turn knows the first, and another process both.
    again = run_child(RUN, "chat", text_file, *options, *kept, stdin="and now?\n")
    assert [out.stderr.count("tokens known)") for out in (done, again)] == [1, 1]


def test_a_grammar_is_kept_to_without_torch(text_file: Path) -> None:
    """By llguidance, of the file's own tokens."""
    pytest.importorskip("llguidance")
    schema = '{"type": "array", "items": {"enum": [10, 20]}, "minItems": 3, "maxItems": 3}'
    options = ["--memory", "50%", "--json-schema", schema, "--max-new-tokens", "60"]
    done = run_child(RUN, "generate", text_file, "hello", *options)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 3
    assert done.stderr.splitlines()[-1] == "False False"


@pytest.mark.parametrize(
    "options", [["--compute", "torch"], ["--dtype", "float32"], ["--device", "cuda"]], ids=str
)
def test_options_of_torchs_way_take_it(text_file: Path, options: list[str]) -> None:
    """Where a file alone does not say how."""
    from moecache.commands import without_torch

    with open_store(text_file) as store:
        arguments = _arguments(text_file, *options)
        assert without_torch.why_torch(arguments, store, is_chat=False).startswith(
            f"{options[0]} is"
        )
        assert without_torch.why_torch(_arguments(text_file), store, is_chat=True) == ""
    why = without_torch.why_torch(_arguments(text_file), "a/name", is_chat=False)
    assert why == "it is a name on the hub"


def _arguments(file: Path, *options: str) -> Any:
    from moecache.cli import _parser

    return _parser().parse_args(["generate", os.fspath(file), "hello", *options])


@pytest.mark.parametrize(
    ("prompt", "error"), [("", "the prompt is empty"), ("x " * 4000, "leaves no room for new ones")]
)
def test_prompts_that_cannot_be_continued(text_file: Path, prompt: str, error: str) -> None:
    """The same errors and exit code as with torch."""
    done = run_child(RUN, "generate", text_file, prompt, "--memory", "50%")
    assert done.returncode == 2
    assert error in done.stderr
    assert "Traceback" not in done.stderr


def test_options_for_ranks_are_refused_without_them(text_file: Path) -> None:
    """As with torch."""
    done = run_child(RUN, "generate", text_file, "hello", "--rank-timeout", "3")
    assert done.returncode == 2
    assert "--rank-timeout is for several processes" in done.stderr


@pytest.fixture(name="copy")
def _copy(text_file: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a copy that may be changed; check that no file and no thread is left."""
    copy = Path(shutil.copy(text_file, tmp_path / "copy.gguf"))
    with nothing_left():
        yield copy


def cut(file: Path) -> None:
    """Take a third of its end away."""
    os.truncate(file, file.stat().st_size * 2 // 3)


def replace(file: Path) -> None:
    """Put a copy in its place."""
    shutil.copy(file, file.with_name("other"))
    file.with_name("other").replace(file)


def overwrite(file: Path) -> None:
    """Change when it was written."""
    os.utime(file, (1, 1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (cut, "copy.gguf: "),
        (replace, "was replaced by another file"),
        (overwrite, "was written to"),
        (Path.unlink, "was removed"),
    ],
)
def test_a_file_that_changes_behind_its_header_is_an_error(
    change: Callable[[Path], object],
    reason: str,
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    """Exit code 1 and a line that names it; no text of two files."""
    open_runtime = opening.open_runtime

    def open_after(*given: Any, **named: Any) -> Any:
        change(copy)
        return open_runtime(*given, **named)

    monkeypatch.setattr(opening, "open_runtime", open_after)
    assert cli.main(["generate", str(copy), "hello", "--memory", "50%"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert reason in shown.err.splitlines()[-1]
    assert "copy.gguf" in shown.err.splitlines()[-1]


def test_a_disk_that_fails_is_an_error(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """While the trunk is read."""

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    begin = trunk.Trunk.__init__

    def begin_failing(*given: Any) -> None:
        monkeypatch.setattr(os, "preadv", fail)
        begin(*given)

    monkeypatch.setattr(trunk.Trunk, "__init__", begin_failing)
    assert cli.main(["generate", str(copy), "hello", "--memory", "50%"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "copy.gguf" in shown.err.splitlines()[-1]
    assert "Input/output error" in shown.err.splitlines()[-1]


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("place", "name", "call"),
    [
        (opening, "open_runtime", 1),
        (trunk.Trunk, "__init__", 1),
        (tokenizer, "read_tokenizer", 1),
        (trunk.Trunk, "matrix", 5),
        (continuing, "continue_text", 1),
        (TextModel, "read", 1),
        (TextModel, "read", 3),
        (TextModel, "new_cache", 1),
        (PrefixCache, "find", 1),
        (PrefixCache, "keep", 1),
        (PrefixCache, "_put", 1),
        (TextModel, "close", 1),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_an_interrupt_in_any_phase_ends_the_command(
    command: str,
    place: Any,
    name: str,
    call: int,
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    """Exit code 130 and one line; a reply's end is none of a conversation."""
    do, num_calls = getattr(place, name), 0

    def interrupted(*given: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            raise KeyboardInterrupt
        return do(*given, **named)

    question = "hello " * 20
    given = [question] if command == "generate" else []
    options = ["--memory", "50%", "--max-new-tokens", "4"]
    options += ["--prefix-cache", str(copy.with_name("pages"))]
    if command == "chat":
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{question}\n"))
        assert cli.main([command, str(copy), *options[:4]]) == 0
    wanted = capsys.readouterr().out
    monkeypatch.setattr(place, name, interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{question}\n/reset\n{question}\n"))
    code = cli.main([command, str(copy), *given, *options])
    shown = capsys.readouterr()
    assert num_calls >= call
    assert "Traceback" not in shown.err
    is_reply = place in {continuing, PrefixCache} or name in {"read", "new_cache"}
    assert code == (0 if command == "chat" and is_reply else 130)
    if code:
        assert shown.err.splitlines()[-1] == "moecache: interrupted"
    else:
        # The next one is what it would have been.
        assert shown.out.endswith(wanted)
    monkeypatch.undo()
    gc.collect()


def test_models_leave_nothing_behind(copy: Path) -> None:
    """Neither closed ones, nor dropped ones, nor those whose text has failed: no memory either."""
    code = """
import gc, sys
from moecache.decoding.files.opening import open_text_model
from moecache.errors import ConfigError

def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def run():
    with open_text_model(sys.argv[1], "50%") as model:
        model.read(list(range(3, 90)), model.new_cache())
        try:
            model.read([], model.new_cache())
        except ConfigError:
            pass
    open_text_model(sys.argv[1], "50%").read([3, 4], model.new_cache())

for _ in range(8):
    run()
before = resident()
for _ in range(30):
    run()
print(resident() - before)
"""
    done = run_child(code, copy)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4 * 2**20


def test_a_forked_child_opens_its_own(copy: Path) -> None:
    """The parent's is refused there, and closed without waiting; the parent goes on."""
    code = """
import os, sys
from moecache.decoding.files.opening import open_text_model
from moecache.errors import MoeCacheError

model = open_text_model(sys.argv[1], "50%")
cache = model.new_cache()
first = model.read([3, 4, 5], cache).tobytes()
child = os.fork()
if not child:
    try:
        model.read([6], cache)
    except MoeCacheError as error:
        assert "open one in the child" in str(error)
        model.close()
        with open_text_model(sys.argv[1], "50%") as own:
            assert own.read([3, 4, 5], own.new_cache()).tobytes() == first
        os._exit(0)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
model.read([6], cache)
model.close()
"""
    done = run_child(code, copy)
    assert done.returncode == 0, done.stderr
