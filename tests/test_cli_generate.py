"""`moecache generate`: the text of the model completely in memory, and nothing else on stdout."""

import gc
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from moecache import cli
from moecache.commands import live_line
from moecache.commands.example import write_text
from moecache.commands.live_line import LiveLine
from moecache.traces.trace import Trace
from tests.helpers.runtimes import make_runtime

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

PROMPT = "def main(argv=None):\n    "
NUM_TOKENS = 12
Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("works", [True, False])
def test_cycles_are_not_collected_while_torch_is_imported(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, works: bool
) -> None:
    """They are from the model on, and after an error; a collector that was off stays off."""
    from moecache.integrations.transformers import generation

    found: list[bool] = []

    def noting(name: str) -> None:
        function = getattr(generation, name)

        def call(*given: Any, **named: Any) -> Any:
            found.append(gc.isenabled())
            return function(*given, **named)

        monkeypatch.setattr(generation, name, call)

    noting("load_tokenizer")
    noting("continue_tokens")
    try:
        if not works:
            gc.disable()
        assert generate(tiny_moe) == 0
        assert [*found, gc.isenabled()] == [False, works, works]
        assert generate(tiny_moe, prompt="") != 0
        assert gc.isenabled() == works
    finally:
        gc.enable()
    capsys.readouterr()


@pytest.fixture(scope="module")
def resident_text(tiny_moe: Path) -> str:
    """Return what the model continues the prompt with, completely in memory."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_moe)
    model = transformers.OlmoeForCausalLM.from_pretrained(tiny_moe)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"][:-1]])
    tokens = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)[0, ids.shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def generate(model: Path | str, *options: str, prompt: str = PROMPT) -> int:
    """Run the command with a quarter of the experts in memory."""
    few = ["--max-new-tokens", str(NUM_TOKENS), "--memory", "25%"]
    return cli.main(["generate", str(model), prompt, *few, *options])


def test_a_prompt_that_is_known_is_not_read_again(
    tiny_moe: Path, tmp_path: Path, capsys: Captured
) -> None:
    """The text is the same, with pages of an earlier run; what is no size or path is said."""
    options = ("--prefix-cache", str(tmp_path / "pages"), "--max-new-tokens", "8")
    texts = []
    for known in ("prompt of 300 in", "prompt of 300 (256 known) in"):
        assert generate(tiny_moe, *options, prompt="once " * 60) == 0
        shown = capsys.readouterr()
        assert known in shown.err
        texts.append(shown.out)
    assert texts[0] == texts[1]
    (tmp_path / "file").write_text("x")
    for wrong in (("--prefix-memory", "much"), ("--prefix-cache", str(tmp_path / "file"))):
        assert generate(tiny_moe, *wrong) == 2
        assert wrong[0] in capsys.readouterr().err


def test_standard_output_is_the_text_of_the_resident_model(
    tiny_moe: Path, resident_text: str, capsys: Captured
) -> None:
    """Greedy; a line break ends it, figures are on standard error."""
    assert generate(tiny_moe, "--temperature", "0") == 0
    shown = capsys.readouterr()
    assert shown.out == resident_text.rstrip("\n") + "\n" or shown.out == resident_text
    last = shown.err.splitlines()[-1]
    for part in (f"{NUM_TOKENS} tokens", "prompt of 25", "hit rate", "60 of 256 experts", "read"):
        assert part in last


@pytest.mark.parametrize("by_file", [True, False])
def test_a_schema_and_a_grammar_hold_the_text(
    tiny_moe: Path, tmp_path: Path, capsys: Captured, by_file: bool
) -> None:
    """From a file, or a schema itself; what is none is said before the model is loaded."""
    pytest.importorskip("llguidance")
    schema, grammar = '{"enum": ["left", "right"]}', 'root ::= "a" [0-9] "!"'
    for name, text in (("schema", schema), ("grammar", grammar), ("wrong", "nonsense")):
        (tmp_path / name).write_text(text)
    given = str(tmp_path / "schema") if by_file else schema
    assert generate(tiny_moe, "--json-schema", given) == 0
    assert capsys.readouterr().out in ('"left"\n', '"right"\n')
    if by_file:
        assert generate(tiny_moe, "--grammar", str(tmp_path / "grammar")) == 0
        shown = capsys.readouterr().out
        assert (shown[0], shown[2:]) == ("a", "!\n")
    for option, value, text in (
        ("--grammar", str(tmp_path / "wrong"), "neither Lark"),
        ("--json-schema", str(tmp_path / "wrong"), "no JSON"),
        ("--json-schema", str(tmp_path / "missing"), "missing"),
        ("--json-schema", '{"type": 1}', "--json-schema"),
    ):
        assert generate(tiny_moe, option, value) == 2
        assert text in capsys.readouterr().err


def test_a_dash_reads_the_prompt_from_standard_input(
    tiny_moe: Path, resident_text: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, line breaks included."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert generate(tiny_moe, "--temperature", "0", prompt="-") == 0
    assert capsys.readouterr().out.rstrip("\n") == resident_text.rstrip("\n")


def test_the_same_seed_draws_the_same_text_under_every_policy(
    tiny_moe: Path, capsys: Captured
) -> None:
    """Another seed draws another one."""
    texts = []
    for options in (
        ("--seed", "1"),
        ("--seed", "1", "--policy", "lru", "--scope", "layer", "--prefetch", "router"),
        ("--seed", "1", "--prefetch", "off", "--read", "buffered", "--dtype", "bfloat16"),
        ("--seed", "2"),
    ):
        assert generate(tiny_moe, "--temperature", "0.8", *options) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    assert texts[3] != texts[0]


def test_stats_trace_and_profile_are_of_this_run(
    tiny_moe: Path, tmp_path: Path, capsys: Captured
) -> None:
    """A line per layer; prompt and tokens but the last in the trace; a profile to start with."""
    trace, profile = tmp_path / "run.npz", tmp_path / "run.profile"
    options = ("--stats", "--record-trace", str(trace), "--profile", str(profile))
    assert generate(tiny_moe, "--temperature", "0", *options) == 0
    assert "layer 7: hit rate" in capsys.readouterr().err
    recorded = Trace.load(trace)
    assert recorded.num_tokens == len(PROMPT) + NUM_TOKENS - 1
    assert profile.stat().st_size > 0


def test_a_trace_that_cannot_be_written_is_a_failure(tiny_moe: Path, capsys: Captured) -> None:
    """The text is there, but the exit code is 1."""
    assert generate(tiny_moe, "--record-trace", "/dev/full") == 1
    shown = capsys.readouterr()
    assert shown.out
    assert "/dev/full" in shown.err.splitlines()[-1]


def test_chat_puts_the_prompt_into_the_template(
    tiny_moe: Path, tmp_path: Path, capsys: Captured
) -> None:
    """As if its text had been given; without a template that is an error at once."""
    for file in tiny_moe.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert generate(tmp_path, "--chat") == 2
    assert "has no chat template" in capsys.readouterr().err
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %} [answer]"
    )
    assert generate(tmp_path, "--chat", "--temperature", "0", prompt="why") == 0
    answer = capsys.readouterr().out
    assert generate(tmp_path, "--temperature", "0", prompt="[user] why [answer]") == 0
    assert capsys.readouterr().out == answer


def test_an_interrupt_keeps_the_text_and_closes_the_model(
    tiny_moe: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 130, the text so far on a line of its own, no thread or file left."""
    import moecache.integrations.transformers as integration

    models: list[Any] = []
    load, write = integration.load, write_text

    def note(*arguments: Any, **options: Any) -> Any:
        models.append(load(*arguments, **options))
        return models[0]

    def interrupt(text: str) -> None:
        write(text)
        if text != "\n" and len(written) == 4:
            raise KeyboardInterrupt
        written.append(text)

    written: list[str] = []
    monkeypatch.setattr(integration, "load", note)
    monkeypatch.setattr(live_line, "write_text", interrupt)
    assert generate(tiny_moe) == 130
    shown = capsys.readouterr()
    assert len(shown.out) >= 5
    assert shown.out.endswith("\n")
    assert shown.err.splitlines()[-1] == "moecache: interrupted"
    assert models[0].moecache.runtime.closed


@pytest.mark.parametrize(
    ("model", "prompt", "options", "code", "message"),
    [
        (
            "",
            "x",
            ("--max-new-tokens", "0"),
            2,
            "--max-new-tokens must be from 1 to 2147483647, got",
        ),
        ("", "x", ("--max-new-tokens", "9" * 30), 2, "--max-new-tokens must be from 1 to 2147"),
        ("", "x", ("--temperature", "-1"), 2, "must be 0 or between 0.01 and 100"),
        ("", "x", ("--seed", str(-(2**63) - 1)), 2, "--seed must be from -2**63 to"),
        ("", "x", ("--seed", str(2**63)), 2, "--seed must be from -2**63 to"),
        ("", "", (), 2, "the prompt is empty"),
        ("", "x\udcff", (), 2, "no UTF-8"),
        ("", "x" * 1024, (), 2, "leaves no room for new ones; the model takes 1024"),
        ("", "x", ("--memory", "lots"), 2, "'lots' is not a size"),
        ("", "x", ("--memory", "50KiB"), 1, "raise memory to at least"),
        ("", "x", ("--record-trace", "/no/such/x.npz"), 2, "there is no directory /no/such"),
        ("", "x", ("--record-trace", ""), 2, "--record-trace is empty"),
        ("./missing", "x", (), 1, "there is no such model"),
        ("README.md", "x", (), 1, "there is no such model"),
        ("docs", "x", (), 1, "there is no .safetensors file; is it a checkpoint"),
    ],
)
def test_errors_are_one_line_with_the_remedy(
    model: str,
    prompt: str,
    options: tuple[str, ...],
    code: int,
    message: str,
    tiny_moe: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2 for usage, 1 for failure; nothing on standard output."""
    monkeypatch.chdir(Path(__file__).parents[1])
    assert generate(model or tiny_moe, *options, prompt=prompt) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1].startswith("moecache: ")
    assert message in shown.err.splitlines()[-1]


def test_without_torch_it_says_what_to_install(
    tiny_moe: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, and how to get it."""
    for name in [name for name in sys.modules if name.startswith("moecache.integrations.trans")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("moecache.integrations.transformers")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert generate(tiny_moe) == 1
    assert "pip install 'moecache[transformers]'" in capsys.readouterr().err


def test_transformers_is_as_talkative_as_before(tiny_moe: Path) -> None:
    """What was switched off for the command is on again."""
    log = transformers.utils.logging
    before = log.get_verbosity(), log.is_progress_bar_enabled()
    assert generate(tiny_moe) == 0
    assert (log.get_verbosity(), log.is_progress_bar_enabled()) == before


@pytest.mark.parametrize("text", ["plain words", "  indented\n\n  twice ", "é€😀 ü", "tab\tend\n"])
def test_streamed_parts_are_the_whole_text(tiny_moe: Path, text: str) -> None:
    """A character of several tokens comes with its last; no part is empty."""
    from moecache.decoding.streams import TextStream

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_moe)
    parts: list[str] = []
    stream = TextStream(tokenizer, torch.tensor([[70, 71]]), parts.append)
    stream.put(torch.tensor([[70, 71]]))
    for token in tokenizer(text)["input_ids"][:-1]:
        stream.put(torch.tensor([token]))
    stream.end()
    assert "".join(parts) == text
    assert all(parts)
    assert len(parts) == len(text)
    assert len(stream.stamps_s) == len(text.encode())


def test_text_on_a_terminal_stands_above_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost, wrapped rows included; escape sequences are not obeyed."""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    console = Console(file=terminal, force_terminal=True, width=40, highlight=False, markup=False)
    with make_runtime(4) as runtime, LiveLine(console, runtime) as line:
        line.stamps_s = [1.0, 2.0]
        list(runtime.waves(0, np.array([[1, 2]], np.int32)))
        for part in ("one ", "two\nthr", "ee ", "word " * 8, "[bold]\x1b[31m end"):
            line.write(part)
    shown = terminal.getvalue()
    assert "\x1b[31m" not in shown
    finished = shown[shown.rindex("\x1b[2K") :]
    assert finished.endswith("end\n")
    for row in ("one two\n", "three word word word", "[bold]\\x1b[31m"):
        assert row in shown
    assert "tokens/s" in shown
    assert "tokens/s" not in finished
