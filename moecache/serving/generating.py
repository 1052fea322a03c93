"""Generating: the thread in which a model's answers come about."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from moecache.decoding.streams import Stopped
from moecache.integrations.transformers import _following
from moecache.integrations.transformers.continuing import Text, has_loop
from moecache.integrations.transformers.together import Together


class Job(Protocol):
    """A text that is wanted; all is called in the thread that generates."""

    def begin(self) -> Text:
        """Return the text, whose prompt is still to be read."""

    def end(self) -> None:
        """Take note of a text that is over, and has not failed."""

    def run(self) -> None:
        """Generate the text where it goes alone, as transformers does it."""


class Generating:
    """A thread that generates the texts of jobs, all that were submitted side by side.

    A text that ranks generate together, or transformers' own loop, goes alone.

    Parameters
    ----------
    model : PreTrainedModel
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._thread = ThreadPoolExecutor(1, "moecache-generate")
        self._lock = threading.Lock()
        self._new: list[tuple[Job, Future[None]]] = []
        self._is_working = False

    def submit(self, job: Job) -> "Future[None]":
        """Begin a job as soon as may be; the future has its error."""
        if is_alone(self._model):
            return self._thread.submit(job.run)
        future: Future[None] = Future()
        with self._lock:
            self._new.append((job, future))
            if not self._is_working:
                self._is_working = True
                self._thread.submit(self._work)
        return future

    def close(self) -> None:
        """End the thread once all jobs are done."""
        self._thread.shutdown()

    def _work(self) -> None:
        """Generate until there is nothing left."""
        together = Together(self._model)
        going: dict[Text, tuple[Job, Future[None]]] = {}
        try:
            while self._take_in(together, going):
                for text in together.advance():
                    # Before its turn is passed on.
                    text.forget()
                    _end(text, *going.pop(text))
        except BaseException as error:
            with self._lock:
                left, self._new, self._is_working = self._new, [], False
            for _, future in (*going.values(), *left):
                if not future.done():
                    future.set_exception(error)
            raise

    def _take_in(self, together: Together, going: "dict[Text, tuple[Job, Future[None]]]") -> bool:
        """Begin what was submitted meanwhile; return whether there is anything to do."""
        with self._lock:
            new, self._new = self._new, []
            if not new and not going:
                self._is_working = False
                return False
        for job, future in new:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                text = job.begin()
            except Stopped:
                # Nobody wants it any more, or the server ends.
                future.set_result(None)
            except Exception as error:  # noqa: BLE001 - the future's, and no other job's
                future.set_exception(error)
            else:
                together.add(text)
                going[text] = job, future
        return True


def _end(text: Text, job: Job, future: "Future[None]") -> None:
    try:
        if text.error is not None:
            raise text.error
        job.end()
    except Exception as error:  # noqa: BLE001 - the future's, and no other job's
        future.set_exception(error)
    else:
        future.set_result(None)


def is_alone(model: Any) -> bool:
    """Return whether a model's texts are generated as a whole, with nothing else meanwhile."""
    return _following.ranks_of(model) is not None or not has_loop(model)


def why_alone(model: Any) -> str:
    """Return why a model's answers do not decode together; empty if they do."""
    if _following.ranks_of(model) is not None:
        return "its experts are spread over processes"
    decoder = model.moecache.decoder
    if not has_loop(model) or decoder is None:
        return "its tokens are not computed by moecache's own loop and kernels"
    return "" if decoder.is_ready() else f"no recipe: {decoder.reason}"
