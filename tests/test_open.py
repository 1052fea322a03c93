"""moecache.open: what memory buys, and where settings come from."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import moecache

SLOT_BYTES = 3 * 64 * 128 * 2  # bfloat16


@pytest.mark.parametrize(
    ("memory", "capacity", "staging"),
    [
        (2 * SLOT_BYTES, 1, 1),
        ("96KiB", 1, 1),
        (64 * SLOT_BYTES, 60, 4),
        ("25%", 60, 4),
        ("3MiB", 60, 4),
        (255 * SLOT_BYTES, 251, 4),
        (256 * SLOT_BYTES, 256, 0),
        ("100%", 256, 0),
        ("1TiB", 256, 0),
    ],
)
def test_all_slots_together_stay_within_the_memory(
    tiny_moe: Path, memory: int | str, capacity: int, staging: int
) -> None:
    """Staging slots come out of the budget; when everything fits there are none."""
    with moecache.open(tiny_moe, memory) as runtime:
        stats = runtime.stats()
    assert (stats.capacity, stats.staging_slots) == (capacity, staging)
    assert stats.pool_bytes == (capacity + staging) * SLOT_BYTES


def test_without_a_budget_everything_that_fits_is_kept(tiny_moe: Path) -> None:
    """The default is what is free, less a reserve."""
    with moecache.open(tiny_moe) as runtime:
        assert runtime.stats().capacity == 256


def test_too_little_memory_is_a_capacity_error_with_the_remedy(tiny_moe: Path) -> None:
    """The message names budget, slot and the least that works."""
    with pytest.raises(moecache.CapacityError, match=r"48\.0 KiB .*raise memory to .* 96\.0 KiB"):
        moecache.open(tiny_moe, SLOT_BYTES)
    with moecache.open(tiny_moe, "96.0 KiB") as runtime:
        assert runtime.stats().capacity == 1


def test_conversion_counts_in_the_budget(tiny_moe: Path) -> None:
    """float32 slots are twice as large, so half as many fit."""
    with moecache.open(tiny_moe, 64 * SLOT_BYTES, dtype=np.float32) as runtime:
        assert runtime.stats().capacity + runtime.stats().staging_slots == 32
        assert runtime.slab("gate_up").dtype == np.float32
    with moecache.open(tiny_moe, "25%", dtype=np.float32) as runtime:
        assert runtime.stats().capacity + runtime.stats().staging_slots == 64
    with moecache.open(tiny_moe, "25%") as runtime:
        assert runtime.slab("gate_up").dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": "lots"}, "'lots' is not a size"),
        ({"memory": "0%"}, "no share"),
        ({"memory": "120%"}, "no share"),
        ({"memory": "nan%"}, "no share"),
        ({"memory": "0.25"}, "'0.25' is not a size; for a share write \"25%\""),
        ({"memory": 0.125}, '0.125 is not a size; for a share write "12.5%"'),
        ({"memory": 2.5}, "2.5 is not a size; write for example 4GiB"),
        ({"memory": "1MiB", "slots": 3}, "not both"),
        ({"slots": 1.5}, "slots must be a whole number, got 1.5"),
        ({"layers": "model.layers.1.mlp"}, r"in a list, such as \['model.layers.1.mlp'\]"),
        ({"prefault": "bckgrnd"}, "prefault 'bckgrnd' is not one of auto, background, off"),
        ({"prefault": 2}, "prefault 2 is not one of"),
        ({"lock": "maybe"}, "lock 'maybe' is not one of on, off"),
        ({"warmpin": "some"}, "warmpin 'some' is not a number of experts, auto or off"),
        ({"prefetch": "all"}, "prefetch 'all' is not one of auto, echo, hints, last, off"),
        ({"slots": 0}, "at least 1, got 0"),
        ({"policy": "nonesuch"}, "'nonesuch' is not one of"),
        ({"scope": "galaxy"}, "'galaxy' is not one of"),
        ({"slots": 4, "scope": "layer"}, "4 slots cannot be split over 8 layers"),
        ({"device": "gpu"}, """'gpu' is neither "cpu" nor "cuda\""""),
        ({"dtype": "int8"}, "floating-point type"),
        ({"dtype": ml_dtypes.int4}, "floating-point type, not to int4"),
        ({"dtype": "nonsense"}, "'nonsense' is no dtype of NumPy; give one such as numpy.float32"),
        ({"dtype": {"a": 1}}, "is no dtype of NumPy"),
        ({"dtype": "f" * 1000}, "is no dtype of NumPy"),
        ({"loader_threads": -1}, "must not be negative"),
        ({"lock": [1]}, "lock must be True or False"),
        ({"read": "zzz"}, "read 'zzz' is not one of auto, buffered, direct, mmap"),
        ({"record_trace": True}, "record_trace must be a path, got True"),
    ],
)
def test_an_argument_that_cannot_be_used_is_a_config_error(
    tiny_moe: Path, arguments: dict[str, object], message: str
) -> None:
    """The message names the value."""
    with pytest.raises(moecache.ConfigError, match=message):
        moecache.open(tiny_moe, **arguments)  # type: ignore[arg-type]


def test_arguments_take_the_words_that_variables_take() -> None:
    """And integers of NumPy."""
    options = moecache.Options(
        slots=np.int64(7), lock="on", warmpin="off", prefetch="yes", prefault="no"
    )  # type: ignore[arg-type]
    assert (options.lock, options.warmpin, options.prefetch, options.prefault) == (
        True,
        0,
        "auto",
        "off",
    )
    assert type(options.slots) is int


def test_the_environment_gives_what_arguments_do_not(
    tiny_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Argument beats environment beats default."""
    monkeypatch.setenv("MOECACHE_MEMORY", "50%")
    monkeypatch.setenv("MOECACHE_POLICY", "lfu")
    monkeypatch.setenv("MOECACHE_SCOPE", "layer")
    monkeypatch.setenv("MOECACHE_EXPERT_STATS", str(tmp_path / "stats.txt"))
    with moecache.open(tiny_moe) as runtime:
        stats = runtime.stats()
    assert (stats.capacity, stats.policy, stats.scope) == (124, "lfu", "layer")
    assert (tmp_path / "stats.txt").exists()
    with moecache.open(tiny_moe, "25%", policy="lru", scope="global") as runtime:
        stats = runtime.stats()
    assert (stats.capacity, stats.policy, stats.scope) == (60, "lru", "global")
    # A number of slots is an argument too: it beats the environment's memory.
    with moecache.open(tiny_moe, slots=7, scope="global") as runtime:
        assert runtime.stats().capacity == 7


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    """A dense model is a clear error."""
    from safetensors.numpy import save_file

    save_file({"model.norm.weight": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(moecache.ConfigError, match="no experts"):
        moecache.open(tmp_path)


def test_layers_that_do_not_run_take_no_part(tiny_moe: Path) -> None:
    """Shares of memory are of those that do."""
    names = [f"model.layers.{number}.mlp" for number in (1, 2)]
    with moecache.open(tiny_moe, "50%", layers=names) as runtime:
        assert list(runtime.layout.layer_names) == names
        assert runtime.layout.total_experts == 64
    with pytest.raises(moecache.ConfigError, match="no layer 'mtp' with experts"):
        moecache.open(tiny_moe, layers=["mtp"])


class Seven:
    """Predicts expert 7."""

    def observe(self, layer: int, ids: np.ndarray) -> None:
        """Learn nothing."""

    def predict(self, layer: int, n: int) -> tuple[np.ndarray, None]:
        """Return it."""
        return np.array([7], np.int32), None

    def begin_sequence(self) -> None:
        """Forget nothing."""


def test_another_predictor_can_take_over(tiny_moe: Path) -> None:
    """It is asked from then on; what is no predictor is refused, and "off" stays off."""
    with moecache.open(tiny_moe, "25%", prefetch="echo") as runtime:
        with pytest.raises(moecache.ConfigError, match="neither one of"):
            runtime.use_predictor("echo")  # type: ignore[arg-type]
        before = runtime.predictor
        runtime.use_predictor(Seven(), "seven")
        assert runtime.predictor is not before
        for layer in range(2):
            runtime.lease(layer, np.array([[7, 1, 2, 3]])).close()
        prefetch = runtime.stats().prefetch
        assert prefetch is not None
        assert prefetch.mode == "seven"
        assert (prefetch.num_used, prefetch.num_found_k) == (4, 1)
    with moecache.open(tiny_moe, "25%", prefetch="off") as runtime:
        runtime.use_predictor(Seven())
        assert runtime.predictor is None
        assert runtime.stats().prefetch is None
