"""Record the server's page while it answers, as an animated picture.

    python -m bench.page docs/page.webp

Needs a chromium, and the extras serve, study (Pillow comes with matplotlib) and test.
"""

import argparse
import tempfile
import time
from pathlib import Path

from PIL import Image

from tests.helpers.browser import opened
from tests.helpers.serving import serving, write_chat_model

ROOT = Path(__file__).parents[1]
SIZE = (1000, 480)
PROMPT = "class Cache:"
# Between two pictures. Played back as recorded.
INTERVAL_S = 0.2
# The end is shown a little longer.
LAST_S = 3.0
QUALITY = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="the picture, a .webp")
    parser.add_argument("--tokens", type=int, default=400, metavar="N", help="of the answer")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        frames = record(Path(folder), arguments.tokens)
    durations = [round(1000 * INTERVAL_S)] * (len(frames) - 1) + [round(1000 * LAST_S)]
    frames[0].save(
        arguments.out,
        save_all=True,
        append_images=frames[1:],
        duration=durations,
        loop=0,
        quality=QUALITY,
        method=6,
    )
    print(f"{arguments.out}: {len(frames)} pictures, {arguments.out.stat().st_size // 1024} KiB")


def record(folder: Path, num_tokens: int) -> list[Image.Image]:
    """Return pictures of the page from the question to the answer's end."""
    import torch

    # Two threads of products would take the cores of server and browser.
    torch.set_num_threads(1)
    directory = write_chat_model(ROOT / "examples" / "tiny_moe", folder / "tiny_moe")
    file = folder / "picture.png"
    frames = []
    with (
        serving(directory, most_tokens=num_tokens) as served,
        opened(folder / "browser", served.url) as tab,
    ):
        tab.show(*SIZE)
        tab.until("map.layers > 0")
        tab.run(f"$('text').value = {PROMPT!r}; $('form').requestSubmit()")
        until_s, is_over = time.monotonic() + 60, False
        while not is_over and time.monotonic() < until_s:
            begun = time.monotonic()
            is_over = tab.run("document.querySelectorAll('.cost').length > 0")
            tab.picture(file)
            with Image.open(file) as picture:
                frames.append(picture.convert("RGB"))
            time.sleep(max(0.0, begun + INTERVAL_S - time.monotonic()))
    return frames


if __name__ == "__main__":
    main()
