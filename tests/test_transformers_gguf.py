"""Models of GGUF files in a bounded number of slots."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moecache import cli, packing
from moecache.errors import ConfigError, MoeCacheError
from tests.helpers.gguf_members import MODELS
from tests.helpers.gguf_models import GgufModel, build_from, read_gguf, write_gguf
from tests.helpers.gguf_tokenizers import byte_level
from tests.helpers.nightly import some
from tests.helpers.offloading import without_least_steps

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")
from moecache.integrations.transformers import _trunk  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [
    torch.arange(length * batch).reshape(batch, length) * 7 % 90 + 3
    for batch, length in ((1, 1), (3, 7), (1, 64))
]
# Multiples of a block, so that nearly all can be quantized.
HIDDEN, WIDTH = 64, 32
# Each kind of experts, and of attention.
DAILY = {"qwen3moe", "gpt-oss", "deepseek2 v3", "granitemoe", "qwen3next", "gemma4"}
DAILY |= {"granitehybrid", "nemotron_h_moe latent", "llama4"}
MIXED = {"exps.weight": "Q4_0", "attn_q.": "Q8_0", "token_embd": "Q8_0", "output.": "Q4_0"}


def load(path: Path, memory: str = "50%", **options: Any) -> Any:
    """Return a file's model with its experts in slots."""
    from moecache.integrations import transformers

    return transformers.load(path, memory, **options)


def sized(name: str, **settings: Any) -> GgufModel:
    """Return a model whose matrices have whole blocks of columns."""
    widths = [key for key in MODELS[name].settings if key.endswith("intermediate_size")]
    sizes = {"hidden_size": HIDDEN, **dict.fromkeys(widths, WIDTH), **settings}
    return replace(MODELS[name], settings={**MODELS[name].settings, **sizes})


def write(path: Path, model: GgufModel, types: Mapping[str, str]) -> Path:
    """Write a random model in some types."""
    original = model.build()
    write_gguf(path, model.metadata(original.config), model.tensors(original), types)
    return path


def logits(model: Any) -> list[Any]:
    """Return a model's logits of each prompt, one after the other."""
    with torch.inference_mode():
        return [model(input_ids=ids).logits for ids in PROMPTS]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_few_slots_has_the_bits_of_the_whole_one(name: str, tmp_path: Path) -> None:
    """Also where experts and trunk are quantized: those of the dequantized weights."""
    path = write(tmp_path / "model.gguf", sized(name), MIXED)
    wanted = logits(build_from(*read_gguf(path)))

    model = load(path, dtype=torch.float32, compute="torch")
    with model.moecache as offload:
        assert all(map(torch.equal, logits(model), wanted))
        assert offload.stats().num_misses
        offload.detach()
    assert all(map(torch.equal, logits(model), wanted))


def test_a_head_and_biases_are_found_wherever_they_are(tmp_path: Path) -> None:
    """A head of its own where published files have none; biases that no first layer has."""
    kinds = ["full_attention", "conv", "full_attention"]
    own = sized("lfm2moe", tie_word_embeddings=False, conv_bias=True, layer_types=kinds)
    path = write(tmp_path / "model.gguf", own, {})
    wanted = logits(own.build())
    model = load(path, dtype=torch.float32, compute="torch")
    with model.moecache:
        assert all(map(torch.equal, logits(model), wanted))


@pytest.mark.parametrize("name", some(MODELS, lambda name: name in DAILY))
def test_kernels_have_the_same_bits_at_any_number_of_slots(name: str, tmp_path: Path) -> None:
    """And, the trunk quantized as in the file, nearly those of torch: activations have 15 bits."""
    path = write(tmp_path / "model.gguf", sized(name), MIXED)
    found = []
    for memory in ("100%", "25%"):
        model = load(path, memory, dtype=torch.float32, compute="fast", trunk="native")
        with model.moecache:
            found.append(logits(model))
    assert all(map(torch.equal, *found))
    wanted = logits(without_least_steps(build_from(*read_gguf(path))))
    for one, other in zip(found[0], wanted, strict=True):
        error = (one - other).square().mean().sqrt()
        assert error < 1e-3 * other.square().mean().sqrt(), name


def test_llama4_decodes_by_kernels_with_chunks_and_attention_temperature(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As its own forward does, chunks passed, in a padded batch; the same bits in any slots.

    Also once its settings were changed, and with logits whose sigmoids are all 1.
    """
    path = write(tmp_path / "model.gguf", sized("llama4"), MIXED)
    assert cli.main(["inspect", str(path)]) == 0
    assert "tokens of llama4: one compiled call each" in capsys.readouterr().out
    whole = build_from(*read_gguf(path))
    models = [load(path, memory, dtype=torch.float32) for memory in ("25%", "100%")]
    ids = torch.arange(26).reshape(2, 13) + 3
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    given = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": False}
    given |= {"return_dict_in_generate": True, "output_logits": True}
    num_steps = 0
    for chunk, floor, scale, times in ((8, 4, 0.5, 1), (16, 4, 0.5, 1), (16, 3, 0.2, 20)):
        for model in (whole, *models):
            model.config.attention_chunk_size = chunk
            for layer in model.model.layers:
                layer.self_attn.floor_scale, layer.self_attn.attn_scale = floor, scale
                if layer.is_moe_layer:
                    with torch.no_grad():
                        layer.feed_forward.router.weight.mul_(times)
        wanted = whole.generate(ids, **given)
        found = [model.generate(ids, **given) for model in models]
        num_steps += 13
        assert models[0].moecache.decoder.num_steps == num_steps, models[0].moecache.decoder.reason
        for one in found:
            assert torch.equal(one.sequences, wanted.sequences)
            for ours, theirs in zip(one.logits, wanted.logits, strict=True):
                assert (ours - theirs).norm() < 1e-3 * theirs.norm()
        assert all(map(torch.equal, found[0].logits, found[1].logits))
    # A cache that was made for other chunks is the modules' business.
    with torch.no_grad():
        out = models[0](input_ids=ids[1:], use_cache=True)
        models[0].config.attention_chunk_size = 4
        out = models[0](input_ids=ids[1:, :1], past_key_values=out.past_key_values)
    assert out.logits.isfinite().all()
    for model in models:
        model.moecache.close()


@pytest.mark.parametrize("trunk", ["bf16", "native"])
@pytest.mark.parametrize("threads", [4, 0], ids=["four threads", "no thread to be had"])
def test_a_trunk_is_the_same_by_any_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, trunk: str
) -> None:
    """Modules get their parameters in one order, whichever thread is done first."""
    path = write(tmp_path / "model.gguf", sized("gpt-oss"), MIXED)
    found = []
    for number in (1, threads):
        monkeypatch.setattr(_trunk, "num_threads", lambda number=number: max(1, number))
        if number == 0:
            monkeypatch.setattr(threading.Thread, "start", _refuse)
        model = load(path, dtype=torch.float32, trunk=trunk, prefault="off", loader_threads=0)
        monkeypatch.undo()
        with model.moecache as offload:
            offload.detach()
        found.append(model.state_dict())
    assert list(found[0]) == list(found[1])
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


def _refuse(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_an_interrupt_ends_the_reading_of_a_trunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no thread has begun is not read, and none is left."""
    path = write(tmp_path / "model.gguf", sized("qwen3moe"), MIXED)
    num_read = 0
    is_over = threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            is_over.set()
            super().shutdown(wait=wait)

    def read(*_: object, **__: object) -> Callable[[], None]:
        nonlocal num_read
        num_read += 1
        assert num_read == 1 or is_over.wait(60)
        return interrupt

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_trunk, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(_trunk, "num_threads", lambda: 1)
    monkeypatch.setattr(_trunk.TrunkWeight, "read", read)
    with pytest.raises(KeyboardInterrupt):
        load(path)
    assert 1 <= num_read <= 2
    assert not any(thread.name.startswith("moecache-trunk") for thread in threading.enumerate())


def test_an_embedding_that_is_the_head_too_is_one_tensor(tmp_path: Path) -> None:
    """But two matrices where they stay quantized: each is in its own order."""
    path = write(tmp_path / "model.gguf", sized("qwen3moe", tie_word_embeddings=True), MIXED)
    wanted = logits(build_from(*read_gguf(path)))
    for trunk in ("bf16", "native"):
        model = load(path, dtype=torch.float32, compute="torch", trunk=trunk)
        with model.moecache:
            found = logits(model)
            shared = model.lm_head.weight is model.model.embed_tokens.weight
        assert shared == (trunk == "bf16")
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=5e-4)


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
@pytest.mark.parametrize("compute", ["torch", "fast"])
def test_a_packed_file_is_the_same_model(name: str, compute: str, tmp_path: Path) -> None:
    """Its experts lie side by side, each under a name of its own, or in compute form."""
    path = write(tmp_path / "model.gguf", sized(name), MIXED)
    packing.pack(path, tmp_path / "packed")
    packing.pack(path, tmp_path / "formed", compute_form=True)
    found = []
    for place in (path, tmp_path / "packed", tmp_path / "formed"):
        model = load(place, compute=compute)
        with model.moecache as offload:
            found.append(logits(model))
            if place.name == "formed":
                assert all(role.is_tiled for role in offload.runtime.layout.layers[0][:2])
                offload.detach()
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))
    if compute == "torch":
        assert all(map(torch.equal, logits(model), found[0]))


def test_gate_and_up_of_two_types(tmp_path: Path) -> None:
    """The dequantized values with torch, near to them with kernels; packed or not, the same."""
    types = {
        "blk.0.ffn_up_exps": "F16",
        "blk.1.ffn_up_exps": "Q8_0",
        "blk.2.ffn_gate_exps": "IQ4_NL",
    }
    path = write(tmp_path / "model.gguf", sized("qwen3moe"), {**types, **MIXED})
    whole = build_from(*read_gguf(path))
    text = whole.generate(PROMPTS[2], max_new_tokens=8, do_sample=False)
    wanted, found = logits(whole), []
    packing.pack(path, tmp_path / "packed")
    packing.pack(path, tmp_path / "formed", compute_form=True)
    for place in (path, tmp_path / "packed", tmp_path / "formed"):
        model = load(place, dtype=torch.float32, compute="torch")
        with model.moecache:
            assert all(map(torch.equal, logits(model), wanted))
        for memory in ("100%", "30%"):
            model = load(place, memory, dtype=torch.float32)
            with model.moecache as offload:
                assert offload.compute == "fast"
                found.append(logits(model))
                same = model.generate(PROMPTS[2], max_new_tokens=8, do_sample=False)
                assert torch.equal(same, text)
                assert offload.decoder is not None
                assert offload.decoder.num_steps
    for one in found:
        assert all(map(torch.equal, one, found[0]))
        for a, b in zip(one, wanted, strict=True):
            assert (a - b).norm() <= 2e-4 * b.norm()


@pytest.mark.parametrize("name", ["deepseek2 v3", "dots1", "qwen3moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_transformers_keeps_in_float32_is_not_rounded(
    name: str, dtype: Any, tmp_path: Path
) -> None:
    """Such as the correction of a router's scores, on which the choice of experts depends."""
    path = write(tmp_path / "model.gguf", sized(name), MIXED)
    build_from(*read_gguf(path)).save_pretrained(tmp_path / "saved")
    kind = type(build_from(*read_gguf(path)))
    wanted = logits(kind.from_pretrained(tmp_path / "saved", dtype=dtype))
    model = load(path, dtype=dtype, compute="torch", trunk="bf16")
    with model.moecache:
        assert all(map(torch.equal, logits(model), wanted))


def test_a_tied_model_is_saved_with_its_head(tmp_path: Path) -> None:
    """Once it has its experts back."""
    path = write(tmp_path / "model.gguf", sized("qwen3moe", tie_word_embeddings=True), MIXED)
    for trunk in ("bf16", "native"):
        model = load(path, dtype=torch.float32, compute="torch", trunk=trunk)
        model.moecache.detach()
        model.save_pretrained(tmp_path / trunk)
        saved = type(model).from_pretrained(tmp_path / trunk)
        assert all(map(torch.equal, logits(model), logits(saved)))


def test_weights_that_stay_quantized_cannot_be_replaced(tmp_path: Path) -> None:
    """Nor can there be more of them; the remedy is said."""
    model = load(write(tmp_path / "model.gguf", sized("qwen3moe"), MIXED), compute="fast")
    with model.moecache:
        for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
            with pytest.raises(MoeCacheError, match=r"cannot be replaced: .* load the model with"):
                embedding.weight = torch.nn.Parameter(torch.zeros(3, 64))
        with pytest.raises(MoeCacheError, match="cannot be resized; load the model with"):
            model.resize_token_embeddings(200)


def test_values_of_weights_that_stay_quantized_cannot_be_written_to(tmp_path: Path) -> None:
    """They are a copy: nothing would be computed with what was written."""
    writes: list[Callable[[Any], object]] = [
        lambda weight: weight.data.fill_(0),
        lambda weight: weight.zero_(),
        lambda weight: weight[2:].mul_(2),
        lambda weight: weight.data.__setitem__(0, 1),
        lambda weight: setattr(weight, "data", torch.zeros(3, 64)),
        lambda weight: weight.detach().view(-1).copy_(torch.ones(weight.numel())),
        lambda weight: torch.add(weight.detach(), 1, out=weight),
        torch.nn.init.normal_,
    ]
    model = load(write(tmp_path / "model.gguf", sized("qwen3moe"), MIXED), compute="fast")
    with model.moecache:
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            for change in writes:
                with pytest.raises(MoeCacheError, match=r"cannot be written to: .* load the model"):
                    change(layer.weight)
            layer.weight.requires_grad_(False).requires_grad = False
            total = layer.weight.float().add_(1).sum()
            assert type(total) is torch.Tensor
            assert (layer.weight + 1).sum(dtype=torch.float32).isfinite()


def test_ids_beyond_a_quantized_embedding_are_errors_as_torch_has_them(tmp_path: Path) -> None:
    """Negative ones are no rows from the end."""
    path = write(tmp_path / "model.gguf", sized("qwen3moe"), MIXED)
    model = load(path, compute="fast")
    with model.moecache:
        for wrong in (-1, model.config.vocab_size):
            with pytest.raises(IndexError):
                model(input_ids=torch.tensor([[3, wrong]]))
        assert model(input_ids=torch.tensor([[3]], dtype=torch.int32)).logits.isfinite().all()


@pytest.mark.parametrize("name", ["gemma4", "gemma4 keys as values", "qwen3moe"])
def test_a_padding_token_is_no_row_to_be_initialized(name: str, tmp_path: Path) -> None:
    """Of an embedding that is read later, which a class of its own does not say."""
    model = MODELS[name].build()
    metadata = MODELS[name].metadata(model.config) | {"tokenizer.ggml.padding_token_id": 0}
    write_gguf(tmp_path / "model.gguf", metadata, MODELS[name].tensors(model))
    found = load(tmp_path / "model.gguf")
    with found.moecache:
        assert found.config.pad_token_id == 0
        assert torch.equal(found.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_the_command_line_continues_a_text_with_the_files_own_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of experts in slots as of the whole model."""
    from moecache.integrations.transformers import generation

    said = byte_level("qwen2")
    known = sized("qwen3moe", vocab_size=len(said["tokenizer.ggml.tokens"]))
    original, path = known.build(), tmp_path / "model.gguf"
    write_gguf(path, known.metadata(original.config) | said, known.tensors(original))
    tokenizer = generation.load_tokenizer(str(path))
    ids = generation.encode(tokenizer, "while it lasts")
    wanted = original.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]

    options = ["--memory", "50%", "--max-new-tokens", "6", "--temperature", "0"]
    assert cli.main(["generate", str(path), "while it lasts", *options]) == 0
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(wanted).rstrip("\n")


def test_what_cannot_be_given_with_a_file_is_refused_by_name(tmp_path: Path) -> None:
    """And so is an architecture that is not known."""
    path = write(tmp_path / "model.gguf", MODELS["qwen3moe"], {})
    with pytest.raises(ConfigError, match="revision cannot be given to load with a GGUF file"):
        load(path, revision="main")
    with pytest.raises(TypeError, match="no argument 'foo', and from_pretrained has none"):
        load(path, foo=1)
    with pytest.raises(
        ConfigError, match="architecture 'qwen9moe' is not supported; supported are"
    ):
        unknown = tmp_path / "unknown.gguf"
        unknown.write_bytes(path.read_bytes().replace(b"qwen3moe", b"qwen9moe"))
        load(unknown)
