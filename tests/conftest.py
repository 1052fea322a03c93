"""Fixtures that several test files share."""

import gc
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from moecache.commands.demo import resident_experts
from moecache.commands.example import find_example
from moecache.cuda import open_device
from moecache.decoding import states_cache
from moecache.errors import MoeCacheError
from moecache.settings import PREFIX
from moecache.stores import open_store
from tests.helpers import families, offloading
from tests.helpers.budgets import BUDGETS, DEFAULT, Budgets
from tests.helpers.fake_device import FakeDevice
from tests.helpers.serving import Served

ROOT = Path(__file__).parents[1]

# A shell's background job ignores SIGINT, and so would every child that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Models of torch and transformers are many objects that live: after every 700 new ones, looking for
# cycles took a twelfth of these tests. Those that are about memory collect themselves.
gc.set_threshold(10_000, 20, 20)


# Files whose tests look at what the machine has one of, or take much of it: the page cache, free
# memory, cgroups, resident bytes, signals. One process runs them, one after another.
MACHINE = (
    *("test_cli_warm", "test_headroom", "test_host_memory", "test_interrupts", "test_mappings"),
    *("test_memory_limit", "test_opening_prefault", "test_prefault", "test_reading_interrupts"),
    *("test_sweep", "test_telemetry_memory"),
)
# Files whose tests take many seconds and little of a processor, as they wait for other processes:
# the budgets of the files among which they begin, so that they begin early, and one by one.
WAITING = {
    "test_ranks_faults": 11,
    "test_cli_ranks": 9.5,
    "test_ranks": 8,
    "test_ranks_heartbeat": 6,
}

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # bench/gpu.sh runs on machines where nothing can be installed
    pass
else:
    # Random examples, in CI too; a busy machine may take any time for them.
    settings.register_profile(
        "moecache",
        derandomize=False,
        print_blob=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("moecache")
    # For --hypothesis-profile, beside the usual 100.
    settings.register_profile("brief", max_examples=30)
    settings.register_profile("long", max_examples=1000)
    settings.register_profile("damage", max_examples=100_000)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--budgets`."""
    parser.addoption(
        "--budgets",
        action="store_true",
        help="show each file's processor time; fail if one passes its budget",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed of hypothesis before it does, one for all processes, so that it can be told."""
    if config.getoption("budgets"):
        config.pluginmanager.register(Budgets())
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))


def pytest_report_header(config: pytest.Config) -> str:
    """Say how to have the same random examples again."""
    return f"random examples: --hypothesis-seed={config.option.hypothesis_seed}"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Say so below failures as well: with -q there is no header."""
    if exitstatus == pytest.ExitCode.TESTS_FAILED:
        terminalreporter.write_line(pytest_report_header(config))


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Iterator[None]:
    """Escape lone surrogates, which damaged files bring into what is logged: none can be sent."""
    return encodable((yield))


def encodable(value: Any) -> Any:
    """Return a report's data with text that UTF-8 has."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(encodable, value))
    return value


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In several processes, begin with what takes longest: in the end none waits for another."""
    if hasattr(config, "workerinput"):
        items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[bool, float]:
    file = item.nodeid.split("::", maxsplit=1)[0]
    budget = WAITING.get(item.path.stem, BUDGETS.get(file, DEFAULT))
    return not item.path.name.startswith(MACHINE), -budget


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests in one process, which makes its fixtures, and those of the machine."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        """Takes files as they were collected."""

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", maxsplit=1)[0]
            return "machine" if Path(file).name.startswith(MACHINE) else file

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def no_settings() -> Iterator[None]:
    """Hide the developer's own settings; a test sets those that it is about."""
    with pytest.MonkeyPatch.context() as patched:
        for name in [*os.environ]:  # noqa: TID251 - what is set, to be hidden
            if name.startswith(PREFIX):
                patched.delenv(name)
        yield


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> None:
    """Leave what earlier files made or imported out of garbage collections; many tests ask for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["fake", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Any:
    """Return a device made for tests, and then a real one, if there is one."""
    if request.param == "fake":
        return FakeDevice()
    try:
        return open_device(request.param)
    except MoeCacheError as error:
        pytest.skip(str(error))


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Return the device that `moecache.open(device="cuda")` finds."""
    device = FakeDevice()
    monkeypatch.setattr("moecache.runtime.plan.open_device", lambda name: device)
    return device


@pytest.fixture
def exact_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep keys and values in float32: sums in another order move none to another bfloat16."""

    def exact(recipe: Any, _: str, *others: Any) -> Any:
        return states_cache.empty_cache(recipe, "f32", *others)

    monkeypatch.setattr("moecache.decoding.program_model.empty_cache", exact)


@pytest.fixture(scope="session")
def tiny_moe() -> Path:
    """Return the directory of the trained model that the project ships."""
    return ROOT / "examples" / "tiny_moe"


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    """Return OpenAI's client of the server that the file has as `served`."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture(scope="session")
def numpy_loop() -> ModuleType:
    """Return the NumPy host loop of the examples."""
    return find_example(None)[0]


@pytest.fixture(scope="session")
def prompt() -> bytes:
    """Return 600 bytes of Python, of which tests take as many as they need."""
    text = Path(find_example(None)[0].__file__ or "").read_bytes()
    return text[1000:1600]


@pytest.fixture(scope="session")
def resident_logits(
    tiny_moe: Path, numpy_loop: ModuleType, prompt: bytes
) -> dict[int, list[np.ndarray]]:
    """Return, per prompt length, the logits of prompt and six tokens, all experts resident."""
    logits = {}
    with open_store(tiny_moe) as store:
        experts = resident_experts(store)
        for length in (1, 7, 64, 600):
            model = numpy_loop.NumpyMoe(store, experts)
            steps = numpy_loop.generate(model, prompt[:length], 6, temperature=0.7, seed=length)
            logits[length] = [scores for _, scores in steps]
    return logits


@pytest.fixture(scope="session")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a small Qwen3-MoE in float32, to be read only."""
    pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("qwen3_moe") / "model"
    return families.write_checkpoint(families.FAMILIES["qwen3_moe"], directory, "float32")


@pytest.fixture(scope="session")
def whole_model(qwen3_moe: Path) -> Any:
    """Return the model of `qwen3_moe` with all its experts in memory; it stays as it is."""
    return offloading.load_whole(families.FAMILIES["qwen3_moe"], qwen3_moe)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Have torch compute in one thread, and children of transformers stay off the network.

    With matrices as small as those of tests, two threads mostly wait for each other.
    """
    torch = pytest.importorskip("torch")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_HUB_OFFLINE", "1")
        yield
    torch.set_num_threads(num_threads)
