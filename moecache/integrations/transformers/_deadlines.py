"""Deadlines: calls into torch that may never return, made in threads that can be left behind."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_Answer = TypeVar("_Answer")


class CallThread:
    """A thread that makes one call after the other, for callers that wait for so long only.

    A call that never returns stays in the thread, which is a daemon. It has no lock that anybody
    else waits for, and Ctrl-C ends a caller's wait, as it would not end a wait inside torch.

    Parameters
    ----------
    what : str
        The name of the called side, for errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="moecache-calls", daemon=True)
        self._thread.start()

    def ask(self, call: Callable[[], _Answer], within_s: float) -> _Answer:
        """Return what a call returns.

        Raises
        ------
        TimeoutError
            If the thread has been in one call for longer than `within_s`: at once, if the call
            began as long ago. Also after `close`.
        """
        if self._is_closed:
            raise TimeoutError(f"{self._what} is not asked any more")
        waited_s = self._busy_s()
        if waited_s < within_s:
            answer: Future[_Answer] = Future()
            self._calls.put((call, answer))
            try:
                return answer.result(within_s - waited_s)
            except TimeoutError:
                if answer.done():  # the call's own
                    raise
                waited_s = max(within_s, self._busy_s())
            finally:
                # A call that had not begun when the wait ended is not made.
                answer.cancel()
        raise TimeoutError(f"{self._what} has not answered for {waited_s:.0f} s")

    def close(self, within_s: float = 0.0) -> bool:
        """End the thread after the calls so far; return whether it ends in time."""
        self._is_closed = True
        self._calls.put(None)
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _busy_s(self) -> float:
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def _run(self) -> None:
        while (found := self._calls.get()) is not None:
            call, answer = found
            if answer.set_running_or_notify_cancel():
                self._busy_since = time.monotonic()
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001 - raised where it was asked for
                    self._busy_since = None
                    answer.set_exception(error)
                else:
                    self._busy_since = None
                    answer.set_result(result)
                    del result
            # Groups end with the last reference to them: none stays in a waiting frame.
            del found, call, answer


def call_within(call: Callable[[], _Answer], within_s: float, what: str) -> _Answer:
    """Return what a call returns, made in a thread of its own; TimeoutError if it takes longer."""
    thread = CallThread(what)
    try:
        return thread.ask(call, within_s)
    finally:
        thread.close()
