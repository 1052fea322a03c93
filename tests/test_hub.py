"""Names that are no path: the hub is asked once, and what it says is told apart."""

import http.server
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moecache import cli
from moecache.errors import StoreError
from moecache.integrations import hub

pytest.importorskip("huggingface_hub")
Captured = pytest.CaptureFixture[str]


class Hub(http.server.ThreadingHTTPServer):
    """A hub of this machine, which notes what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.code = ""
        self.asked: list[str] = []


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        """Answer as the test said."""
        self.server.asked.append(self.path)
        self.send_response(self.server.status)
        if self.server.code:
            self.send_header("X-Error-Code", self.server.code)
        self.send_header("ETag", '"0"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(name="server")
def _server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        point_to(f"http://127.0.0.1:{server.server_port}", monkeypatch, tmp_path)
        yield server
        server.shutdown()
        thread.join()


def point_to(url: str, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Have names looked for there."""
    hub.ask.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))


def make_cached(cache: Path, **config: object) -> Path:
    """Put a whole model into the cache; return the directory of its files."""
    model = cache / "models--some--model"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        (snapshot / name).touch()
    return snapshot


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (404, "RepoNotFound", "has no such model, or a private one; check the name, or log in"),
        (401, "", "has no such model, or a private one; check the name, or log in"),
        (403, "GatedRepo", "accepted its terms: do so at"),
        (503, "", "says: .*503"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat", "bench"])
def test_a_name_that_the_hub_does_not_have_is_told_at_once(
    command: str, status: int, code: str, said: str, server: Hub, capsys: Captured
) -> None:
    """After one question, in one line, and before anything is imported that takes seconds."""
    server.status, server.code = status, code
    more = ["why"] if command == "generate" else []
    assert cli.main([command, "some/model", *more]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "'some/model': there is no such file or directory here, and" in line
    assert re.search(said, line)
    assert server.asked == ["/some/model/resolve/main/config.json"]


def test_a_hub_that_does_not_answer_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    """For so many seconds; neither is a port that nobody listens at tried again."""
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hole:
        point_to(f"http://127.0.0.1:{hole.getsockname()[1]}", monkeypatch, tmp_path)
        assert cli.main(["generate", "nothing", "why"]) == 1
        assert "could not be reached: " in capsys.readouterr().err
        hole.settimeout(5)
        hole.accept()[0].close()
        hole.settimeout(0.3)
        with pytest.raises(TimeoutError):
            hole.accept()
    assert cli.main(["chat", "nothing"]) == 1
    assert "check the name, or the network" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["./some", "../some", "~/some", "a/b/c", "some.gguf", "a/b.GGUF"])
def test_what_looks_like_a_path_is_not_looked_for(name: str, server: Hub, capsys: Captured) -> None:
    """Of a path that is not there, the hub knows nothing."""
    assert cli.main(["generate", name, "why"]) == 1
    assert "there is no such model" in capsys.readouterr().err
    assert server.asked == []


def test_a_model_in_the_cache_needs_no_network(server: Hub, tmp_path: Path) -> None:
    """If all of it is there; else the hub is asked, once for all that want it."""
    snapshot = make_cached(tmp_path)
    assert hub.look_up("some/model") == {"local_files_only": True}
    assert server.asked == []
    (snapshot / "model.safetensors").unlink()
    assert hub.look_up("some/model") == hub.look_up("some/model") == {}
    assert len(server.asked) == 1


def test_offline_the_cache_alone_counts(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HF_HUB_OFFLINE is named where it is the reason."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StoreError, match="none in the hub's cache, while HF_HUB_OFFLINE forbids"):
        hub.look_up("some/model")
    make_cached(tmp_path, auto_map={})
    assert hub.look_up("some/model") == {}
    assert server.asked == []
