"""Models whose slots are on a GPU: the same output, through torch's own memory and streams.

The device made for tests calls itself "cpu" here, so that tensors of a torch without CUDA are
its arrays; the same tests run on a GPU where there is one. There the whole model computes
"grouped_mm" as a product per expert: torch's own kernel adds up in another order.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moecache
from moecache import cli
from moecache.errors import ConfigError, MoeCacheError
from moecache.slots import CudaSlots
from tests.helpers.fake_device import FakeDevice
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.offloading import generated, load_whole, prompt
from tests.helpers.tensor_device import opened
from tests.test_cuda_experts import FP32, make_runtime

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from moecache.integrations.transformers import attach, load  # noqa: E402
from moecache.integrations.transformers._on_device import join_torch  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]


@pytest.fixture(params=["fake", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a device as torch knows it; "cuda" opens slots there."""
    return opened(request.param, monkeypatch, "native grouped_mm" not in request.node.name)


def added_otherwise(rows: Any, matrices: Any, *, offs: Any) -> Any:
    """Return grouped products, one in 16 of which another order of the sum rounded otherwise."""
    out = rows.new_zeros((len(rows), matrices.shape[2]))
    start = 0
    for expert, stop in enumerate(offs.tolist()):
        out[start:stop] = rows[start:stop] @ matrices[expert]
        start = stop
    out.view(torch.int16).view(-1)[::16] ^= 1
    return out


@pytest.fixture(params=["qwen3_moe", "gpt_oss", "llama4", "qwen3_vl_moe_hub"])
def family(request: pytest.FixtureRequest) -> Any:
    """Return a family of each kind: plain, transposed with biases, patched, transposed in files."""
    return FAMILIES[request.param]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("memory", ["25%", "100%"])
def test_logits_and_tokens_are_those_of_the_whole_model(
    gpu: str, family: Any, dtype: str, memory: str, tmp_path: Path
) -> None:
    """Bit for bit, with the look-ahead, wherever experts were."""
    if gpu != "cpu" and not family.has_interface:
        pytest.skip("its own batched product may add up in another order on a GPU")
    path = write_checkpoint(family, tmp_path / "model", dtype)
    whole = load_whole(family, path, dtype).to(gpu)
    model = load(path, memory, "cuda", dtype=getattr(torch, dtype), prefetch="router")
    ids = prompt().to(gpu)
    with model.moecache as offload, torch.no_grad():
        assert isinstance(offload.runtime.pool, CudaSlots)
        assert model.device == torch.device(gpu)
        assert torch.equal(model(ids).logits, whole(ids).logits)
        assert torch.equal(generated(model, ids), generated(whole, ids))
        assert "uploads to" in offload.report()
        offload.runtime.cache.check()


@pytest.mark.parametrize("products", ["native grouped_mm"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_products_that_add_up_in_another_order_differ_by_roundings(
    gpu: str, name: str, products: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits in bfloat16 differ by at most 1/32 of the largest, and by no more than 1/64 in norm.

    bfloat16 rounds to 2**-9 of a value. A tie of the router that is decided otherwise would differ
    by more: these models have none for this prompt.
    """
    family = FAMILIES[name]
    path = write_checkpoint(family, tmp_path / "model", "bfloat16")
    whole = load_whole(family, path, "bfloat16").to(gpu)
    model = load(path, "25%", "cuda", dtype=torch.bfloat16)
    ids = prompt().to(gpu)
    if gpu == "cpu":  # where torch's own adds up as single products do
        monkeypatch.setattr(torch.nn.functional, "grouped_mm", added_otherwise)
    with model.moecache, torch.no_grad():
        found, wanted = (one(ids).logits.float() for one in (model, whole))
    assert (found - wanted).abs().max() <= wanted.abs().max() / 32
    assert (found - wanted).norm() <= wanted.norm() / 64
    if gpu == "cpu":
        assert not torch.equal(found, wanted)


def test_the_command_generates_on_a_gpu(
    gpu: str, tiny_moe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same text as on the CPU."""
    texts = []
    for device in ("cpu", "cuda"):
        few = ["--max-new-tokens", "8", "--memory", "25%", "--temperature", "0"]
        command = ["generate", str(tiny_moe), "def main(", *few, "--device", device]
        assert cli.main(command) == 0
        texts.append(capsys.readouterr().out)
    if gpu == "cpu":
        assert texts[0] == texts[1]
    assert texts[1]


def test_gradients_go_through(gpu: str, qwen3_moe: Path, whole_model: Any) -> None:
    """Backward reads the experts again, into the same slots."""
    ids = prompt().to(gpu)
    whole = whole_model.to(gpu)
    model = load(qwen3_moe, "25%", "cuda", dtype=torch.float32)
    with model.moecache:
        found, wanted = (
            torch.autograd.grad(one(ids).logits.sum(), one.model.norm.weight)[0]
            for one in (model, whole)
        )
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    whole_model.to("cpu")


def test_detach_gives_the_experts_back(gpu: str, qwen3_moe: Path, whole_model: Any) -> None:
    """On the device of the model."""
    ids = prompt().to(gpu)
    model = load(qwen3_moe, "25%", "cuda", dtype=torch.float32)
    model.moecache.detach()
    assert {parameter.device for parameter in model.parameters()} == {torch.device(gpu)}
    assert torch.equal(generated(model, ids), generated(whole_model.to(gpu), ids))
    whole_model.to("cpu")


def test_slots_hold_what_the_file_holds(gpu: str, qwen3_moe: Path) -> None:
    """Nothing is converted on the way to a GPU: the model must be of the file's type."""
    with pytest.raises(ConfigError, match="load the model with dtype='float32'"):
        load(qwen3_moe, "25%", "cuda", dtype=torch.bfloat16)


def test_a_model_elsewhere_is_an_error(gpu: str, qwen3_moe: Path) -> None:
    """With where the slots are, and what to do."""
    model = load(qwen3_moe, "25%", "cuda", dtype=torch.float32)
    with model.moecache:
        layer = model.moecache._layers[0]
        layer.device = torch.device("cuda:7")
        with pytest.raises(MoeCacheError, match=r"model\.to\('cuda:7'\)"):
            model(prompt().to(gpu))


def test_what_is_there_without_cuda_is_said_before_the_trunk_is_read(qwen3_moe: Path) -> None:
    """A missing package or driver, say; or a name that is none."""
    with pytest.raises(ConfigError, match='neither "cpu" nor "cuda"'):
        load(qwen3_moe, "25%", "gpu")
    with pytest.raises(ConfigError, match='give device="cuda"'):
        load(qwen3_moe, "25%", device_map={"": 0})


def test_attach_takes_a_runtime_on_a_gpu(gpu: str, qwen3_moe: Path, whole_model: Any) -> None:
    """As `load` does it, in two steps."""
    family = FAMILIES["qwen3_moe"]
    ids = prompt().to(gpu)
    model = load_whole(family, qwen3_moe).to(gpu)
    with moecache.open(qwen3_moe, "25%", "cuda") as runtime:
        attach(model, runtime)
        assert torch.equal(generated(model, ids), generated(whole_model.to(gpu), ids))
        assert runtime.stats().num_misses > 0
        with runtime.lease(0, np.arange(2)) as lease:
            assert len(lease.slots) == 2
        model.moecache.close()
    whole_model.to("cpu")


def test_torch_gives_back_what_it_keeps_where_slots_need_it() -> None:
    """Its allocator and CuPy's know nothing of each other."""
    device = FakeDevice()
    with make_runtime(device, FP32, 5) as runtime:
        join_torch(runtime)
        assert device.on_out_of_memory is torch.cuda.empty_cache
        assert device.stream_source is not None
        device.stream_source = None
