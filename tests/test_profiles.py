"""Profiles: one file for disks and models, whole or not at all, and believed only if it is sane."""

import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import moecache
from moecache.layout import ExpertLayout
from moecache.policies._echo import Echo
from moecache.profiles.file import (
    MAX_MODELS,
    ModelUsage,
    Profile,
    identity,
    read_profile,
    update_profile,
)

ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _capture(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "moecache")


def usage(seed: int = 0, policy: str = "echo") -> ModelUsage:
    """Return the usage of a model of 2 layers of 6 experts."""
    rng = np.random.default_rng(seed)
    echo = Echo(2, 6)
    for _ in range(20):
        for layer in (0, 1):
            echo.observe(layer, rng.choice(6, 2, replace=False))
    return ModelUsage(
        policy,
        rng.integers(0, 2**63, (2, 6), np.uint64),
        rng.choice(12, 5, replace=False).astype(np.int32),
        echo.state() if policy == "echo" else {},
    )


def same(one: ModelUsage, other: ModelUsage) -> bool:
    """Return whether two are equal, to the last bit."""
    pairs = [(one.counts, other.counts), (one.residents, other.residents)]
    pairs += [(array, other.echo[name]) for name, array in one.echo.items()]
    return (
        one.policy == other.policy
        and set(one.echo) == set(other.echo)
        and all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)
        and all(a.shape == b.shape for a, b in pairs)
    )


def is_empty(found: Profile | None) -> bool:
    """Return whether a profile was found that has nothing in it."""
    return found is not None and not found.disks and not found.models


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    path = tmp_path / "kept" / "model.profile"
    path.parent.mkdir()
    return path


def test_what_is_written_is_read(path: Path) -> None:
    """Disks and models; the second write keeps what the first had of others."""
    assert read_profile(path).models == {}
    update_profile(path, disks={"8": {"depth": 16}}, models={"a": usage(1)})
    update_profile(path, disks={"9": {"depth": 32}}, models={"b": usage(2, "lru")})
    update_profile(path, models={"a": usage(3)})
    found = read_profile(path)

    assert found.disks == {"8": {"depth": 16}, "9": {"depth": 32}}
    assert list(found.models) == ["b", "a"]
    assert same(found.models["a"], usage(3))
    assert same(found.models["b"], usage(2, "lru"))
    assert os.listdir(path.parent) == [path.name]


def test_arrays_without_elements_are_kept(path: Path) -> None:
    """Nothing was resident at the end."""
    empty = ModelUsage("lru", np.zeros((0, 6), np.uint64), np.zeros(0, np.int32))
    update_profile(path, models={"a": empty})

    assert same(read_profile(path).models["a"], empty)


def test_the_file_says_what_it_is(path: Path) -> None:
    """Its first two lines are text."""
    update_profile(path, models={"a": usage()})
    first, header = path.read_bytes().split(b"\n")[:2]

    assert first.startswith(b"moecache-profile 1 ")
    assert json.loads(header)["models"][0]["policy"] == "echo"


def test_the_model_saved_longest_ago_leaves(path: Path) -> None:
    """The file does not grow for ever."""
    for number in range(MAX_MODELS + 2):
        update_profile(path, models={str(number): usage(number, "lru")})
    update_profile(path, models={"2": usage(2, "lru")})
    update_profile(path, models={"new": usage(0, "lru")})

    found = list(read_profile(path).models)
    assert len(found) == MAX_MODELS
    assert found[-2:] == ["2", "new"]
    assert found[0] == "4"


def test_models_are_told_apart_by_their_experts() -> None:
    """By number, names and sizes; not by where they lie."""
    base = ExpertLayout.uniform(num_layers=3, num_experts=8, top_k=2, expert_bytes=64)
    others = [
        ExpertLayout.uniform(num_layers=4, num_experts=8, top_k=2, expert_bytes=64),
        ExpertLayout.uniform(num_layers=3, num_experts=9, top_k=2, expert_bytes=64),
        ExpertLayout.uniform(num_layers=3, num_experts=8, top_k=2, expert_bytes=65),
        ExpertLayout(8, 2, base.layers, ["a", "b", "c"]),
    ]
    assert identity(base) == identity(ExpertLayout(8, 4, base.layers))
    assert len({identity(layout) for layout in [base, *others]}) == 5


def test_a_file_cut_short_anywhere_is_damaged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At every length: one warning that names file and reason, and it is replaced."""
    update_profile(path, disks={"8": {"depth": 16}}, models={"a": usage(1, "lru")})
    whole = path.read_bytes()
    for length in range(len(b"moecache-profile 1 "), len(whole)):
        path.write_bytes(whole[:length])
        caplog.clear()
        found = read_profile(path)
        assert found is not None
        assert (found.disks, found.models) == ({}, {})
        (record,) = caplog.records
        assert f"profile.ignored {path}: is damaged" in record.getMessage()
    update_profile(path, models={"b": usage(2)})
    assert list(read_profile(path).models) == ["b"]


@ONE_FOLDER
@given(data=st.data())
def test_a_bit_that_was_flipped_anywhere_is_found(path: Path, data: st.DataObject) -> None:
    """Whether in the first line, the header or the arrays."""
    path.unlink(missing_ok=True)
    update_profile(path, disks={"8": {"depth": 16}}, models={"a": usage(1, "lru")})
    whole = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    path.write_bytes(whole)

    found = read_profile(path)
    assert found is None or is_empty(found)


def sealed(header: Any, arrays: bytes = b"") -> bytes:
    """Return a profile of any content, with the right checksum."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = text + b"\n" + arrays
    return b"moecache-profile 1 " + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def model(*arrays: object) -> dict[str, object]:
    """Return a header of one model."""
    return {"disks": {}, "models": [{"model": "a", "policy": "lru", "arrays": list(arrays)}]}


COUNTS = ["counts", "<u8", [1, 2]]
RESIDENTS = ["residents", "<i4", [1]]


@pytest.mark.parametrize(
    ("header", "num_bytes"),
    [
        (b"", 0),
        (b"{", 0),
        (b"null", 0),
        (b"[]", 0),
        (b"[" * 100_000, 0),
        (b"\xff\xfe", 0),
        (b'{"disks": {}, "models": [' + b"9" * 5000 + b"]}", 0),
        ({}, 0),
        ({"disks": {}}, 0),
        ({"disks": [], "models": []}, 0),
        ({"disks": {}, "models": {}}, 1),
        ({"disks": {}, "models": 3}, 0),
        ({"disks": {}, "models": [3]}, 0),
        ({"disks": {}, "models": [{"model": "a", "policy": "lru"}]}, 0),
        (model(), 0),
        (model(COUNTS), 16),
        (model(COUNTS, RESIDENTS), 19),
        (model(COUNTS, RESIDENTS), 21),
        (model(["counts", "<u8", [2**40, 2**40]], RESIDENTS), 20),
        (model(["counts", "<u8", [10**400]], RESIDENTS), 20),
        (model(["counts", "<u8", [-1, -2]], RESIDENTS), 20),
        (model(["counts", "<u8", [True, 2]], RESIDENTS), 20),
        (model(["counts", "<u8", [1.0, 2]], RESIDENTS), 20),
        (model(["counts", "<u8", "12"], RESIDENTS), 20),
        (model(["counts", "<u8", [1] * 70 + [2]], RESIDENTS), 20),
        (model(["counts", "<u8", 2], RESIDENTS), 20),
        (model(["counts", "|O", [1, 2]], RESIDENTS), 20),
        (model(["counts", ["<u8"], [1, 2]], RESIDENTS), 20),
        (model(["counts", "i4,i4", [1, 2]], RESIDENTS), 20),
        (model([None, "<u8", [1, 2]], RESIDENTS), 20),
        (model(["counts", "<u8"], RESIDENTS), 20),
        ({"disks": {"8": 3}, "models": []}, 0),
        ({"disks": {"8": {"depth": [16]}}, "models": []}, 0),
    ],
    ids=lambda value: ascii(value)[-90:-20] if len(ascii(value)) > 95 else ascii(value),
)
def test_a_content_that_cannot_be_is_damage(
    path: Path, header: object, num_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Even with the right checksum; nothing is allocated by what it says."""
    path.write_bytes(sealed(header, bytes(num_bytes)))

    assert is_empty(read_profile(path))
    (record,) = caplog.records
    assert f"profile.ignored {path}: is damaged" in record.getMessage()


@pytest.mark.parametrize(
    ("arrays", "num_bytes", "reason"),
    [
        ([["counts", "<i8", [1, 2]], RESIDENTS], 20, "counts are int64"),
        ([["counts", "<f4", [1, 2]], RESIDENTS], 12, "counts are float32"),
        ([["counts", "<u8", [2]], RESIDENTS], 20, "counts are uint64 of shape [2]"),
        ([["counts", "<u8", [0, 2]], RESIDENTS], 4, "residents are not all in [0, 0)"),
        ([COUNTS, ["residents", "<f4", [1]]], 20, "residents are float32"),
        ([COUNTS, ["residents", "<i4", [1, 1]]], 20, "residents are int32 of shape [1, 1]"),
        ([COUNTS, RESIDENTS, ["echo.values", "<i4", [1, 2]]], 28, "'values' is int32"),
        ([COUNTS, RESIDENTS, ["echo.values", "<f4", [2, 1]]], 28, "'values' has the shape"),
        ([COUNTS, RESIDENTS, ["echo.masks", "<f4", [1]]], 24, "'masks' is float32"),
    ],
)
def test_arrays_that_no_run_writes_are_damage(
    path: Path, arrays: list[Any], num_bytes: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another dtype, another shape, or naming experts that are not there."""
    path.write_bytes(sealed(model(*arrays), bytes(num_bytes)))

    assert is_empty(read_profile(path))
    assert f"is damaged: its {reason}" in caplog.text


def test_floats_that_are_no_number_are_damage(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No run could have learned them."""
    echo = {**usage().echo, "fast": np.full((2, 6), np.nan, np.float32)}
    kept = usage()
    update_profile(path, models={"a": ModelUsage("echo", kept.counts, kept.residents, echo)})

    assert is_empty(read_profile(path))
    assert "is damaged: its 'fast' has values" in caplog.text


@given(
    content=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["disks", "models", "model", "policy", "arrays", "x"]), inner
            )
        ),
        max_leaves=12,
    ),
    arrays=st.binary(max_size=20),
)
@ONE_FOLDER
def test_any_json_is_a_profile_or_a_damaged_one(path: Path, content: object, arrays: bytes) -> None:
    """Nothing is ever raised."""
    path.write_bytes(sealed(content, arrays))
    found = read_profile(path)
    assert found is not None
    assert found.models == {}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"moecache-profile 2 ", "of another version, b'2 '"),
        (b"moecache-profile 10 abc\n{}", "of another version, b'10 abc'"),
        (b'{"version": 1, "disks": {}}', "is no moecache profile"),
        (b"\x93NUMPY", "is no moecache profile"),
        (b"the only copy of a thesis", "is no moecache profile"),
        (b"m", "is no moecache profile"),
        (b"moecache-profile", "is no moecache profile"),
        (b"moecache-profile 1", "is no moecache profile"),
    ],
)
def test_what_is_no_profile_of_ours_is_never_written_over(
    path: Path, content: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistyped path must not cost a file, nor an old version what a new one kept."""
    path.write_bytes(content)
    with pytest.raises(moecache.FormatError, match=reason):
        update_profile(path, models={"a": usage()})

    assert read_profile(path) is None
    assert path.read_bytes() == content
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert reason in record.getMessage()


@pytest.mark.parametrize("given_path", [b"p", 3, True, 1.5, Path, "\udcff", "\ud800/p"])
def test_what_is_no_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_path: Any
) -> None:
    """By every function, naming the argument; and nothing is written."""
    monkeypatch.chdir(tmp_path)
    for call in (read_profile, update_profile):
        with pytest.raises(moecache.ConfigError, match=r"^profile "):
            call(given_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o444])
def test_a_files_permissions_stay(path: Path, mode: int) -> None:
    """Whoever could not read it still cannot; nor could anybody meanwhile."""
    path.touch()
    path.chmod(mode)
    update_profile(path, models={"a": usage()})

    assert path.stat().st_mode & 0o7777 == mode
    assert list(read_profile(path).models) == ["a"]


def test_a_new_file_has_the_permissions_of_any_new_file(path: Path) -> None:
    """Those that the umask leaves."""
    before = os.umask(0o027)
    try:
        update_profile(path, models={"a": usage()})
    finally:
        os.umask(before)

    assert path.stat().st_mode & 0o7777 == 0o640


def test_an_empty_file_is_filled(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As mktemp leaves it."""
    path.touch()
    assert read_profile(path) is not None
    update_profile(path, models={"a": usage()})
    assert list(read_profile(path).models) == ["a"]
    assert not caplog.records


@pytest.mark.parametrize("name", ["directory", "directory/no/file", "file/below", "n" * 300, ""])
def test_a_path_that_cannot_be_written_is_an_error_with_its_name(tmp_path: Path, name: str) -> None:
    """And nothing is left behind."""
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_bytes(b"")
    target = f"{tmp_path}/{name}" if name else ""
    with pytest.raises(moecache.StoreError) as caught:
        update_profile(target, models={"a": usage()})
    assert target in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["directory", "file"]
    assert os.listdir(tmp_path / "directory") == []


def test_a_pipe_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody may ever write to it."""
    os.mkfifo(tmp_path / "pipe")
    assert read_profile(tmp_path / "pipe") is None
    assert "no regular file" in caplog.text


def test_a_directory_that_is_read_only_is_an_error(path: Path) -> None:
    """The old profile is still there."""
    if os.geteuid() == 0:
        pytest.skip("nothing is read-only to root")
    update_profile(path, models={"a": usage(1)})
    path.parent.chmod(0o500)
    try:
        with pytest.raises(moecache.StoreError, match="Permission denied"):
            update_profile(path, models={"a": usage(2)})
    finally:
        path.parent.chmod(0o700)
    assert same(read_profile(path).models["a"], usage(1))


@pytest.mark.parametrize("call", ["fsync", "write", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_in_the_middle_leaves_the_old_one(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    """Nor is half a file left beside it."""
    update_profile(path, models={"a": usage(1)})

    def fail(*_: object) -> None:
        raise error

    class Failing:
        def __init__(self, inner: Any) -> None:
            self.inner = inner
            self.fileno, self.flush = inner.fileno, inner.flush

        def write(self, data: bytes) -> None:
            self.inner.write(data[:100])
            fail()

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            self.inner.close()

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    elif call == "replace":
        monkeypatch.setattr(Path, "replace", fail)
    else:
        real = Path.open
        monkeypatch.setattr(Path, "open", lambda *arguments: Failing(real(*arguments)))
    expected = moecache.StoreError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        update_profile(path, models={"a": usage(2)})
    monkeypatch.undo()

    assert os.listdir(path.parent) == [path.name]
    assert same(read_profile(path).models["a"], usage(1))


def test_it_is_on_the_disk_before_it_has_its_name(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a power cut could leave an empty file in the place of the old one."""
    order: list[str] = []
    replace, fsync = Path.replace, os.fsync

    def synced(descriptor: int) -> None:
        order.append("fsync")
        fsync(descriptor)

    def replaced(path: Path, target: Path) -> Path:
        order.append("replace")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    update_profile(path, models={"a": usage()})

    assert order == ["fsync", "replace"]


def test_threads_that_save_at_once_lose_nothing(path: Path) -> None:
    """And whoever reads meanwhile finds a whole file, old or new."""
    problems: list[Exception] = []

    def save(number: int) -> None:
        try:
            for turn in range(5):
                name = f"{number % 4}-{turn % 2}"
                update_profile(path, disks={name: {}}, models={name: usage(turn, "lru")})
        except Exception as error:  # noqa: BLE001 - shown by the test's own thread
            problems.append(error)

    def readings() -> Iterator[Profile | None]:
        while any(thread.is_alive() for thread in threads):
            yield read_profile(path)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    sizes = [len(found.models) for found in readings()]
    for thread in threads:
        thread.join()

    assert not problems
    assert sizes == sorted(sizes)
    assert len(read_profile(path).models) == len(read_profile(path).disks) == 8
    assert os.listdir(path.parent) == [path.name]
