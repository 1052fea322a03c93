"""The random Qwen3-MoE checkpoint of the benchmarks: whole, and routed as trained ones are."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import qwen3_moe
from bench.decoded import routing
from moecache.study import statistics

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def make_checkpoint(directory: Path, *, overlap: float = 0.4, seed: int = 0) -> Path:
    """Write two layers of 16 experts."""
    config = qwen3_moe.make_config(2, 16, 2, hidden=64, width=32, vocabulary=512)
    qwen3_moe.write_checkpoint(directory, config, overlap=overlap, seed=seed)
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a small checkpoint."""
    return make_checkpoint(tmp_path_factory.mktemp("qwen3_moe"))


def load(directory: Path) -> tuple[Any, dict[str, Any]]:
    """Load all of it with transformers; return what that says of the names, too."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, output_loading_info=True
    )
    return loaded[0], loaded[1]


def test_transformers_finds_every_tensor_and_no_other(checkpoint: Path) -> None:
    """No key is missing, unexpected or of another shape."""
    _, found = load(checkpoint)

    assert not any(found[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))


def test_tensors_are_those_that_save_pretrained_writes(checkpoint: Path, tmp_path: Path) -> None:
    """Names and total size of the index are those of transformers' own."""
    model, _ = load(checkpoint)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    name = "model.safetensors.index.json"

    ours, theirs = (json.loads((folder / name).read_text()) for folder in (checkpoint, tmp_path))

    assert set(ours["weight_map"]) == set(theirs["weight_map"])
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]


@pytest.mark.parametrize("sample", [True, False], ids=["sampled", "greedy"])
def test_decoded_tokens_share_experts_with_the_one_before(checkpoint: Path, sample: bool) -> None:
    """The overlap is near what was asked for, in each layer, and no few experts take all uses."""
    model, _ = load(checkpoint)

    found = statistics(routing(model, 200, sample=sample))

    assert ((found.overlap > 0.25) & (found.overlap < 0.55)).all()
    assert (found.top_shares[:, 1] < 0.9).all()


def test_the_overlap_can_be_asked_for(tmp_path: Path) -> None:
    """Of two checkpoints the one that was asked for more has more in each layer."""
    few, many = (
        statistics(routing(load(make_checkpoint(tmp_path / str(share), overlap=share))[0], 100))
        for share in (0.35, 0.7)
    )

    assert (few.overlap + 0.1 < many.overlap).all()


def test_a_seed_gives_the_same_files(checkpoint: Path, tmp_path: Path) -> None:
    """Written twice, shards are equal; of another seed they are not."""
    again = make_checkpoint(tmp_path / "again")
    other = make_checkpoint(tmp_path / "other", seed=1)
    for shard in checkpoint.glob("*.safetensors"):
        assert (again / shard.name).read_bytes() == shard.read_bytes()
        assert (other / shard.name).read_bytes() != shard.read_bytes()


def test_text_goes_through_the_tokenizer_unchanged(checkpoint: Path) -> None:
    """Any text is encoded, with ids that the model has, and decoded to what it was."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    text = "for x in range(3): # äöü"

    ids = tokenizer(text)["input_ids"]

    assert tokenizer.decode(ids) == text
    assert max(ids) < len(tokenizer) == 512


def test_the_script_writes_and_shows_what_it_routes_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes are taken from the command line; the figures are printed at the end."""
    sizes = ["--layers=1", "--experts=8", "--top-k=2", "--hidden=64", "--width=16"]

    assert qwen3_moe.main([str(tmp_path), *sizes, "--vocabulary=300", "--tokens=20"]) == 0

    output = capsys.readouterr().out
    assert "20 tokens decoded" in output
    assert "hit rate at 12.5, 25, 50 %, lru" in output


def test_a_vocabulary_without_room_for_all_bytes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written, and the message names the option."""
    with pytest.raises(SystemExit):
        qwen3_moe.main([str(tmp_path / "model"), "--vocabulary=100"])

    assert "--vocabulary 100" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
