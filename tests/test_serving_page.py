"""The page at `/`, in a real browser: what it shows is what the runtime says."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.browser import CHROMIUM, Tab, opened
from tests.helpers.serving import Served, serving, until, write_chat_model

for package in ("torch", "transformers", "starlette", "uvicorn", "websockets"):
    pytest.importorskip(package)
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]
# Colours of the cells in the middle, as [layer][expert][red, green, blue].
_CELLS = """(() => {
  const { width, height } = $("map"), side = map.pitch / 2;
  const all = $("map").getContext("2d").getImageData(0, 0, width, height).data;
  const colour = (layer, expert) => {
    const [x, y] = corner(layer, expert).map((place) => Math.floor(place + side - 1));
    return [...all.slice(4 * (y * width + x), 4 * (y * width + x) + 3)];
  };
  const numbers = (count) => [...Array(count).keys()];
  return numbers(map.layers).map((layer) => numbers(map.experts).map((e) => colour(layer, e)));
})()"""


@pytest.fixture(name="served", scope="module")
def _served(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_chat_model(tiny_moe, tmp_path_factory.mktemp("served") / "tiny")
    with serving(directory, most_tokens=40) as served:
        yield served


@pytest.fixture(name="tab")
def _tab(served: Served, tmp_path: Path) -> Iterator[Tab]:
    with opened(tmp_path, served.url) as tab:
        yield tab


def ask(tab: Tab, text: str) -> None:
    """Type a message and send it."""
    tab.run(f"$('text').value = {text!r}; $('form').requestSubmit()")


def test_a_chat_is_answered_and_the_cells_are_the_runtimes(served: Served, tab: Tab) -> None:
    """Its cost is shown; experts in memory, pinned ones and all others differ in colour."""
    tab.show(1280, 800)
    tab.until("map.layers > 0")
    ask(tab, "def main(argv=None):")
    tab.until("document.querySelectorAll('.cost').length === 1")
    assert tab.run("document.querySelector('.reply p').textContent.length") > 20
    cost = tab.run("document.querySelector('.cost').innerText").replace("\xa0", " ")
    for part in ("read ", " MiB", "waited ", "computed ", "hit rate ", "40 tokens, "):
        assert part in cost

    until(lambda: served.engine.answer is None)
    cache = served.engine.runtime.cache
    pinned = tuple(np.argwhere(cache.slot_table >= 0)[0].tolist())
    assert cache.pin(*pinned)
    tab.run("poll()")
    stats = served.engine.runtime.stats()
    tab.until(f"$('map').dataset.pinned === '{stats.num_pinned}'")
    tab.until("drawn === 0")  # nothing fades any more
    assert tab.run("Number($('map').dataset.resident)") == stats.num_resident
    assert f"{stats.num_resident} of 256 experts in memory" in tab.run("$('room').textContent")
    cells = np.array(tab.run(_CELLS), int)
    resident = cache.slot_table >= 0
    absent = cells[~resident]
    assert len(np.unique(absent, axis=0)) == 1
    assert (cells[resident] != absent[0]).any(axis=1).all()
    assert len(np.unique(cells[resident], axis=0)) > 10  # brighter the more they are used
    assert (cells == cells[pinned]).all(axis=2).sum() == 1
    assert tab.complaints == []
    assert {url.split("/")[2] for url in tab.requested if "://" in url} == {
        f"127.0.0.1:{served.port}"
    }


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_a_telephone_and_stops_a_reply(
    served: Served, tab: Tab, dark: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is cut off at the right; what was said before the stop stays."""
    tab.show(400, 840, dark=dark, scale=2)
    tab.until("map.layers > 0")
    monkeypatch.setattr(served.engine, "most_tokens", 900)
    ask(tab, "class Parser:")
    tab.until("document.querySelector('.reply p')?.textContent.length > 3")
    assert tab.run("$('send').textContent") == "Stop"
    left = served.engine.totals.left
    tab.run("$('form').requestSubmit()")
    until(lambda: served.engine.totals.left == left + 1)
    tab.until("$('send').textContent === 'Send'")
    assert tab.run("document.querySelector('.reply p').textContent.length") > 3
    assert tab.run("document.documentElement.scrollWidth") == 400
    assert tab.run("$('map').getBoundingClientRect().right") < 400
    light = tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(250, 249, 247)"
    assert light is not dark


def test_thoughts_stand_apart(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above what the model says, and they are not sent again."""
    from moecache.integrations import answer_parts
    from moecache.serving import checks

    class Thinks(answer_parts.AnswerParser):
        thought = "<think>hm</think>"

        def feed(self, text: str) -> list[answer_parts.Piece]:
            thought, self.thought = self.thought, ""
            return super().feed(thought + text)

    fields = {"reasoning_content": answer_parts._THINK, "content": {"content": "text"}}
    known = answer_parts.AnswerFormat(fields)
    monkeypatch.setattr(checks, "format_of", lambda _: known)
    monkeypatch.setattr(checks, "AnswerParser", Thinks)
    tab.until("map.layers > 0")
    ask(tab, "def main(argv=None):")
    tab.until("document.querySelectorAll('.cost').length === 1")
    assert tab.run("document.querySelector('.reply .thought').textContent") == "hm"
    assert "hm" not in tab.run("messages.at(-1).content")
    assert tab.complaints == []


def test_the_page_waits_for_the_model(served: Served, tmp_path: Path) -> None:
    """It says how far that is; a message that is sent meanwhile is answered afterwards."""
    from moecache.serving.app import build_app
    from moecache.serving.front import Front
    from moecache.serving.server import Server, bind
    from moecache.telemetry.loading import Loading

    async def stop() -> None:
        pass

    loading = Loading()
    front = Front(("tiny",), loading)
    server = Server(front, front)
    with contextlib.closing(bind("127.0.0.1", 0)) as bound, contextlib.closing(server):
        server.start(bound)
        loading.note("reading experts ahead", 1024, 4096)
        with opened(tmp_path, f"http://127.0.0.1:{bound.getsockname()[1]}") as tab:
            tab.until("$('status').textContent.startsWith('loading: reading experts ahead')")
            assert "1.00 KiB of 4.00 KiB" in tab.run("$('status').textContent")
            ask(tab, "def main(argv=None):")
            until(lambda: front._num_waiting == 1)
            # The engine goes on after this server.
            ends = SimpleNamespace(drain=lambda: None, stop=stop)
            front.open(build_app(served.engine), ends)
            tab.until("document.querySelectorAll('.cost').length === 1")
            tab.until("map.layers > 0")
            assert [one for one in tab.complaints if "503" not in one] == []
