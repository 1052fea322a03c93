"""Signs of life: who is there, who has ended, and who is silent."""

import re
import threading
import time
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from moecache.integrations.transformers._heartbeat import BEAT_S, Heartbeat
from tests.helpers.ranks import Network


def test_silence_counts_from_when_the_caller_says() -> None:
    """A rank that beats is there; one that does not is missing after as long as was given."""
    from torch.distributed import HashStore

    store = HashStore()
    first, second = (Heartbeat(store, "a", rank, 3) for rank in range(2))
    try:
        assert first.missing(0.1) == ""
        time.sleep(3 * BEAT_S)
        assert first.missing(60) == ""
        assert re.fullmatch(
            r"rank 2 is gone, or its process is stopped: no sign of life for \d+ s",
            first.missing(0.1),
        )
        second.end("it failed: OSError: the disk is on fire")
        assert first.missing(60) == "rank 1: it failed: OSError: the disk is on fire"
    finally:
        first.end("")
        second.end("")


def test_a_rank_that_was_not_called_is_told_to_be() -> None:
    """It lives, and did not come to the exchange that another one waits at."""
    from torch.distributed import HashStore

    store = HashStore()
    first, second = (Heartbeat(store, "b", rank, 2) for rank in range(2))
    try:
        second.note(5)
        assert second.diagnose(2 * BEAT_S) == (
            "rank 0 is alive, but did not come as far as this one; call the model on every rank, "
            "as often and with the same"
        )
    finally:
        first.end("")
        second.end("")


def _in_time(call: Callable[[], object]) -> str:
    """Return what a call returns or raises, though it may never end."""
    found: list[str] = []

    def run() -> None:
        try:
            found.append(str(call()))
        except OSError as error:
            found.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    return found[0] if found else "waits for ever"


def test_nobody_waits_for_a_store_that_hangs() -> None:
    """Its machine takes packets, and never answers: with a beat under way, and from then on."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = set(threading.enumerate())
    with Network(server.port) as network:
        client = TCPStore("127.0.0.1", network.port, is_master=False)
        one = Heartbeat(client, "c", 1, 2, timeout_s=2)
        assert one.posted("a") is None
        network.lose()
        assert _in_time(lambda: one.posted("a")).startswith(
            "TimeoutError: the ranks' store has not answered for "
        )
        said = _in_time(lambda: one.diagnose(1))
        assert said.startswith(
            "rank 0 or the launcher, which keeps the ranks' store, is stopped, or its machine "
            "hangs or is not to be reached: the ranks' store has not answered for "
        )
        calls: list[Callable[[], object]] = [
            *(lambda: one.post("a", "b"), lambda: one.remove("a"), lambda: one.missing(1)),
        ]
        for call in calls:
            assert _in_time(call).startswith("TimeoutError: the ranks' store has not answered for")
        assert _in_time(lambda: one.said(0)) == "it failed"
        for end in (lambda: one.say("a"), lambda: one.end("b"), lambda: one.wait_for_others(1)):
            assert _in_time(end) == "None"
        # An interpreter that is finalized would be aborted if the store answered then.
        one.close()
        left = {thread.name for thread in set(threading.enumerate()) - before}
        assert not any(name.startswith("moecache-") for name in left), left
