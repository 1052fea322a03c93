"""Signs of life: who is there, who has ended, and who is silent."""

import time

import pytest

pytest.importorskip("torch")

from moecache.integrations.transformers._heartbeat import BEAT_S, Heartbeat


def test_silence_counts_from_when_the_caller_says() -> None:
    """A rank that beats is there; one that does not is missing after as long as was given."""
    from torch.distributed import HashStore

    store = HashStore()
    first, second = (Heartbeat(store, "a", rank, 3) for rank in range(2))
    try:
        assert first.missing(0.1) == ""
        time.sleep(3 * BEAT_S)
        assert first.missing(60) == ""
        assert first.missing(0.1) == ("rank 2 is gone, or its process is stopped: no sign of life")
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
