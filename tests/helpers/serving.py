"""A server over the tiny model, in a thread of the test's own process."""

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass
class Served:
    """A server that runs.

    Attributes
    ----------
    port : int
    engine : Engine
        Of the server's thread; looked at here, and likewise:
    server : Server
    directory : Path
        The checkpoint.
    """

    port: int
    engine: Any
    server: Any
    directory: Path

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> Any:
        """Return what is there, from JSON."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as found:
            return json.load(found)


def write_chat_model(source: Path, directory: Path, template: str = TEMPLATE) -> Path:
    """Return a checkpoint that is another one with a chat template."""
    directory.mkdir()
    for file in source.iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "chat_template.jinja").write_text(template)
    return directory


@contextlib.contextmanager
def serving(
    directory: Path, compute: str | None = "fast", device: str = "cpu", **options: Any
) -> Iterator[Served]:
    """Serve a checkpoint with a quarter of its experts in memory."""
    from moecache.integrations.transformers import generation, load
    from moecache.integrations.transformers.served import Served as ByTorch

    tokenizer = generation.load_tokenizer(str(directory))
    model = load(directory, "25%", device, prefetch="off", compute=compute)
    with model.moecache, _answering(ByTorch(model), tokenizer, directory, **options) as served:
        yield served


@contextlib.contextmanager
def serving_file(path: Path, memory: str = "25%", **options: Any) -> Iterator[Served]:
    """Serve a GGUF file without torch."""
    from moecache.decoding.files.opening import open_text_model, read_tokenizer
    from moecache.decoding.files.served import Served as OfFile

    with open_text_model(path, memory, prefetch="off") as model:
        tokenizer = read_tokenizer(model.runtime.store)
        with _answering(OfFile(model), tokenizer, path, **options) as served:
            yield served


@contextlib.contextmanager
def _answering(model: Any, tokenizer: Any, path: Path, **options: Any) -> Iterator[Served]:
    from moecache.serving.app import build_app
    from moecache.serving.engine import Engine
    from moecache.serving.server import Server, bind

    with (
        contextlib.closing(bind("127.0.0.1", 0)) as bound,
        contextlib.closing(Engine(model, tokenizer, (path.name,), **options)) as engine,
    ):
        server = Server(build_app(engine), engine)
        thread = threading.Thread(target=server.run, args=([bound],), name="test-server")
        thread.start()
        try:
            until(lambda: server.started)
            yield Served(bound.getsockname()[1], engine, server, path)
        finally:
            server.should_exit = True
            thread.join()


def until(holds: Callable[[], bool]) -> None:
    """Return once something holds; fail after a minute."""
    end_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.005)
