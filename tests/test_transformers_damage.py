"""Damaged files of a checkpoint: each is read, or refused by an error of the project."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moecache import cli
from moecache.errors import ConfigError, FormatError, MoeCacheError
from tests.helpers import quantized
from tests.helpers.damage import bounded_memory, spoil, spoil_behind_length, spoil_json
from tests.helpers.examples import num_examples
from tests.helpers.offloading import load_in_slots
from tests.helpers.serving import write_chat_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
Captured = pytest.CaptureFixture[str]
# How each file is damaged, and how often beside the others.
FILES: dict[str, tuple[Callable[..., bytes], int]] = {
    "config.json": (spoil_json, 6),
    "generation_config.json": (spoil_json, 3),
    "tokenizer_config.json": (spoil_json, 2),
    "chat_template.jinja": (spoil, 1),
    "model.safetensors": (spoil_behind_length, 1),
}


@pytest.fixture(name="models", scope="module")
def _models(
    tiny_moe: Path, qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """Return a model with a chat template, one that has no tokenizer, and a quantized one."""
    folder = tmp_path_factory.mktemp("whole")
    fp8, _ = quantized.write_quantized(quantized.QWEN3_MOE, quantized.channels(), folder)
    return [write_chat_model(tiny_moe, folder / "chat"), qwen3_moe, fp8]


@pytest.fixture(name="model")
def _model(models: list[Path], tmp_path: Path) -> Path:
    """Return a copy of the first, to be damaged."""
    return shutil.copytree(models[0], tmp_path / "model")


def use(path: Path) -> None:
    """Load a checkpoint, its tokenizer if it has one, and generate."""
    from moecache.decoding import streams
    from moecache.integrations.transformers import generation

    prompt = torch.tensor([[3, 4, 5]])
    if (path / "tokenizer_config.json").exists():
        tokenizer = generation.load_tokenizer(str(path))
        generation.encode(tokenizer, "why", chat=True)
    model = load_in_slots(path)
    with model.moecache:
        times = streams.TokenTimes()
        generation.continue_tokens(model, prompt, times, max_new_tokens=2)


def change(path: Path, **values: Any) -> None:
    """Change what a JSON file says."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_damaged_file_is_read_or_refused(
    models: list[Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Whatever else is raised names the document that a run of the same seed makes again."""
    seed = request.config.getoption("hypothesis_seed", None) or 0
    for model in models:
        use(model)
    for number in range(num_examples(25)):
        rng = random.Random(f"{seed} {number}")
        directory = shutil.copytree(rng.choice(models), tmp_path / str(number))
        name = rng.choice(
            [n for n, (_, times) in FILES.items() for _ in range(times) if (directory / n).exists()]
        )
        document = FILES[name][0](rng, (directory / name).read_bytes())
        (directory / name).unlink()
        (directory / name).write_bytes(document)
        try:
            with bounded_memory():
                use(directory)
        except (MoeCacheError, MemoryError):
            pass
        except BaseException as error:
            error.add_note(f"--hypothesis-seed={seed}, {name} {number}: {document[:2000]!r}")
            raise
        shutil.rmtree(directory)


@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        ("config.json", {"hidden_size": "32"}, r"config\.json: .*'hidden_size' expected int"),
        ("config.json", {"architectures": 3}, r"config\.json: architectures is 3, not a list"),
        ("config.json", {"architectures": [[]]}, r"config\.json: architectures is \[\[\]\], not"),
        ("config.json", {"hidden_act": "none"}, r"config\.json: .*hidden_act='none'.*KeyError"),
        ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; no model"),
        ("config.json", {"num_experts_per_tok": -1}, "num_experts_per_tok is -1; a token goes to"),
        ("config.json", {"num_experts_per_tok": [2, -1]}, "num_experts_per_tok is -1; a token"),
        ("config.json", {"num_labels": 10**9}, "num_labels is 1000000000; no model"),
        ("config.json", {"vocab_size": 10**9}, r"embed_tokens\.weight is \[.*wants \[1000000000, "),
        (
            "generation_config.json",
            {"eos_token_id": "x"},
            r"n_config\.json: eos_token_id must be .*, got 'x'",
        ),
        ("generation_config.json", {"do_sample": {}}, "do_sample must be true or false, got {}"),
        (
            "generation_config.json",
            {"top_k": 1e9},
            r"top_k must be a whole number, got 1.*\.0",
        ),
        ("generation_config.json", {"compile_config": 3}, r"generation_config\.json: .*Compile"),
    ],
    ids=str,
)
def test_the_error_names_file_and_field(
    model: Path, file: str, values: dict[str, Any], said: str
) -> None:
    """And has the cause, if it is another program's."""
    change(model / file, **values)
    with pytest.raises(FormatError, match=said) as caught:
        use(model)
    assert ("transformers cannot" in str(caught.value)) == (caught.value.__cause__ is not None)


def test_a_file_that_safetensors_refuses_is_named(models: list[Path], tmp_path: Path) -> None:
    """A hole between two tensors is none to moecache, but is to transformers."""
    model = shutil.copytree(models[1], tmp_path / "model")
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        load_in_slots(model)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b'{"model_type": "olmoe", "hidden_act": []}'),
        ("config.json", b"{"),
        ("generation_config.json", b"["),
        ("tokenizer_config.json", b"\xff"),
        ("tokenizer_config.json", b'{"tokenizer_class": 3}'),
        ("tokenizer_config.json", b'{"tokenizer_class": "ByT5Tokenizer", "eos_token": 3}'),
        ("chat_template.jinja", b"{% for %}"),
        ("chat_template.jinja", b"\xff"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_command_prints_one_line(
    command: str, file: str, content: bytes, model: Path, capsys: Captured
) -> None:
    """With the model, and no traceback."""
    (model / file).unlink()
    (model / file).write_bytes(content)
    more = ["why", "--chat"] if command == "generate" else []
    assert cli.main([command, str(model), *more, "--memory", "25%"]) in {1, 2}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("moecache: ")


def test_errors_of_this_package_are_no_damage(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although transformers is what calls it."""
    monkeypatch.setattr("moecache.integrations.transformers._source.bind", {}.pop)
    with pytest.raises(TypeError, match="object is not iterable"):
        load_in_slots(model)


def test_a_token_beyond_the_model_s_is_refused(model: Path) -> None:
    """A tokenizer of another model has it."""
    from moecache.decoding import streams
    from moecache.integrations.transformers import generation

    loaded, prompt = load_in_slots(model), torch.tensor([[3, 10**6]])
    with (
        loaded.moecache,
        pytest.raises(ConfigError, match="has token 1000000, but the model knows"),
    ):
        generation.continue_tokens(loaded, prompt, streams.TokenTimes(), max_new_tokens=1)
