"""Models of the hub by name: which files they are, and how they come into the cache."""

import hashlib
import http.server
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

from moecache import cli
from moecache.errors import ConfigError, StoreError
from moecache.integrations.hub_download import resolve
from moecache.integrations.hub_files import HubName, choose_gguf, choose_safetensors
from tests.test_hub import point_to

COMMIT = "1" * 40
Q4, Q8 = "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"


def etag_of(data: bytes) -> str:
    """Return a file's name in the cache."""
    return hashlib.sha256(data).hexdigest()


class Hub(http.server.ThreadingHTTPServer):
    """A hub with one repository, "some/model"; a download may be broken off once."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.got: list[tuple[str, int]] = []
        self.breaks_at = 0


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        """Answer as to GET, without a body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer with the list of files, or a part of one."""
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/some/model/tree"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in self.server.files.items()
            ]
            self._send(200, json.dumps(entries).encode())
            return
        data = self.server.files.get(path.partition("/resolve/")[2].partition("/")[2])
        if not path.startswith("/some/model/") or data is None:
            code = "EntryNotFound" if path.startswith("/some/model/") else "RepoNotFound"
            self._send(404, b"", {"X-Error-Code": code})
            return
        start = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        headers = {"ETag": f'"{etag_of(data)}"', "X-Repo-Commit": COMMIT}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET":
            self.server.got.append((path.rpartition("/")[2], start))
        self._send(206 if start else 200, data[start:], headers)

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            most = self.server.breaks_at or len(data)
            self.wfile.write(data[:most])
            if most < len(data):
                self.server.breaks_at = 0
                self.connection.close()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(name="hub")
def _hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        point_to(f"http://127.0.0.1:{server.server_port}", monkeypatch, tmp_path / "cache")
        (tmp_path / "cache").mkdir()
        yield server
        server.shutdown()
        thread.join()


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid to ask."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("some/model", ("some/model", None, None)),
        ("some/model:Q4_K_M", ("some/model", None, "Q4_K_M")),
        ("some/model@v1:q8_0", ("some/model", "v1", "q8_0")),
        ("model", None),
        ("a/b/c", None),
        ("some/model.gguf", None),
        ("../model:Q8_0", None),
        ("C:/model", None),
    ],
)
def test_a_name_says_repository_revision_and_quantisation(text: str, found: Any) -> None:
    """What has another form is a path."""
    name = HubName.parse(text)
    assert (name and (name.repo, name.revision, name.quant)) == found


def test_a_quantisation_is_found_among_files() -> None:
    """In any case, at the root or in a folder, with all of its parts; never what lies beside."""
    files = [
        *("mmproj-Q8_0.gguf", "imatrix.gguf", "m-Q8_0.gguf", "README.md", "m-Q4_K_M.gguf"),
        *(f"UD-Q2_K_XL/m-UD-Q2_K_XL-0000{i}-of-00002.gguf" for i in (2, 1)),
    ]
    assert choose_gguf("n", files) == ["m-Q4_K_M.gguf"]
    assert choose_gguf("n", files, "q8_0") == ["m-Q8_0.gguf"]
    parts = [f"UD-Q2_K_XL/m-UD-Q2_K_XL-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert choose_gguf("n", files, "UD-Q2_K_XL") == parts
    assert choose_gguf("n", files, file=parts[1]) == parts
    assert choose_gguf("n", ["only-Q6_K.gguf"]) == ["only-Q6_K.gguf"]


@pytest.mark.parametrize(
    ("files", "quant", "problem"),
    [
        (["a-Q8_0.gguf"], "Q5_K", "no quantisation 'Q5_K'; it has Q8_0"),
        (["a-Q8_0.gguf", "a-Q6_K.gguf"], None, "several quantisations and no Q4_K_M"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "several models"),
        (["a-Q8_0-00001-of-00002.gguf"], "Q8_0", "part 2 of 2"),
        (["mmproj.gguf"], "Q8_0", "no .gguf file of a model"),
    ],
)
def test_what_cannot_be_told_is_an_error_with_what_there_is(
    files: list[str], quant: str | None, problem: str
) -> None:
    """So that the user can say which."""
    with pytest.raises(StoreError, match=problem):
        choose_gguf("some/model", files, quant)


def test_of_safetensors_only_what_is_read_is_taken() -> None:
    """No other formats, copies and folders."""
    wanted = ["config.json", "model-1.safetensors", "model.safetensors.index.json", "t.jinja"]
    others = ["pytorch_model.bin", "original/x.safetensors", "consolidated.safetensors", "a.gguf"]
    others += ["pytorch_model.bin.index.json", ".gitattributes"]
    assert choose_safetensors([*others, *wanted]) == sorted(wanted)


def test_a_model_is_downloaded_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file alone; then nothing is asked, and nothing has to be."""
    hub.files = {Q4: b"four" * 99, Q8: b"eight" * 99, "../../evil-Q4_0.gguf": b"evil"}
    path = Path(resolve("some/model:Q8_0"))
    assert path.read_bytes() == hub.files[Q8]
    assert {name for name, _ in hub.got} == {Q8}
    hub.got.clear()
    offline(monkeypatch)
    assert resolve("some/model:Q8_0") == str(path)
    assert not hub.got
    with pytest.raises(StoreError, match="HF_HUB_OFFLINE"):
        resolve("some/model:Q4_K_M")


def test_a_repository_without_a_model_is_told(hub: Hub) -> None:
    """With what was looked for."""
    hub.files = {"README.md": b"x"}
    with pytest.raises(StoreError, match="neither safetensors nor GGUF"):
        resolve("some/model")


def test_parts_come_all_together(hub: Hub) -> None:
    """The path is that of the first."""
    parts = {f"Q4_K_M/m-Q4_K_M-0000{i}-of-00002.gguf": bytes([i]) * 50 for i in (1, 2)}
    hub.files = {**parts, "m-Q8_0.gguf": b"x"}
    path = Path(resolve("some/model"))
    assert path.name == "m-Q4_K_M-00001-of-00002.gguf"
    assert sorted(file.name for file in path.parent.iterdir()) == sorted(
        name.rpartition("/")[2] for name in parts
    )


def test_a_broken_download_goes_on(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where it ended, in the same call or in a later process's."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 2**16)
    hub.files = {Q8: os.urandom(2**20), Q4: os.urandom(2**20)}
    hub.breaks_at = 2**19
    assert Path(resolve("some/model:Q8_0")).read_bytes() == hub.files[Q8]
    assert [start for _, start in hub.got] == [0, 2**19]
    # What a process left that was killed.
    blobs = tmp_path / "cache" / "models--some--model" / "blobs"
    (blobs / f"{etag_of(hub.files[Q4])}.partial").write_bytes(hub.files[Q4][: 2**18])
    hub.got.clear()
    assert Path(resolve("some/model:Q4_K_M")).read_bytes() == hub.files[Q4]
    assert [start for _, start in hub.got] == [2**18]


def test_a_disk_without_room_is_told_before(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both numbers."""
    hub.files = {Q8: b"x" * 5000}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(StoreError, match=r"4\.9 KiB.* 1000 bytes are free|4\.88 KiB.*free"):
        resolve("some/model:Q8_0")
    assert not hub.got


def test_what_is_there_is_no_name(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path wins; a file of a path is an error, and so are two ways to say which."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "model").mkdir()
    assert resolve("some/model") == "some/model"
    with pytest.raises(ConfigError, match="not of some/model"):
        resolve("some/model", file=Q8)
    with pytest.raises(ConfigError, match="one of them"):
        resolve("other/model:Q8_0", file=Q8)
    with pytest.raises(StoreError, match="no such model"):
        resolve("other/model:Q8_0")
    assert not hub.got


def test_commands_take_names(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """Each looks at the file in the cache; -hf is another way to say MODEL."""
    hub.files = {Q8: b"GGUF, but no more"}
    for command in (["inspect", "some/model:Q8_0"], ["generate", "-hf", "some/model:Q8_0", "x"]):
        assert cli.main(command) == 1
        assert Q8 in capsys.readouterr().err
