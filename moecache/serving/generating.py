"""Generating: the thread in which a model's answers come about."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from moecache.decoding.streams import Stopped
from moecache.serving.model import ServedModel, ServedText, ServedTogether


class Job(Protocol):
    """A text that is wanted; all is called in the thread that generates."""

    def begin(self) -> ServedText:
        """Return the text, whose prompt is still to be read."""

    def end(self) -> None:
        """Take note of a text that is over, and has not failed."""

    def run(self) -> None:
        """Generate the text where it goes alone, as a whole."""


class Generating:
    """A thread that generates the texts of jobs, all that were submitted side by side.

    A text that ranks generate together, or transformers' own loop, goes alone.

    Parameters
    ----------
    model : ServedModel
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._thread = ThreadPoolExecutor(1, "moecache-generate")
        self._lock = threading.Lock()
        self._new: list[tuple[Job, Future[None]]] = []
        self._is_working = False

    def submit(self, job: Job) -> "Future[None]":
        """Begin a job as soon as may be; the future has its error."""
        if self._model.is_alone:
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
        together = self._model.together()
        going: dict[ServedText, tuple[Job, Future[None]]] = {}
        try:
            while self._take_in(together, going):
                for text in together.advance():
                    _end(text, *going.pop(text))
        except BaseException as error:
            with self._lock:
                left, self._new, self._is_working = self._new, [], False
            for _, future in (*going.values(), *left):
                if not future.done():
                    future.set_exception(error)
            raise

    def _take_in(
        self, together: ServedTogether, going: "dict[ServedText, tuple[Job, Future[None]]]"
    ) -> bool:
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


def _end(text: ServedText, job: Job, future: "Future[None]") -> None:
    error = text.error
    try:
        # Before its turn is passed on.
        text.forget()
    except Exception as failure:  # noqa: BLE001 - the future's, and no other job's
        error = error or failure
    try:
        if error is not None:
            raise error
        job.end()
    except Exception as error:  # noqa: BLE001 - the future's, and no other job's
        future.set_exception(error)
    else:
        future.set_result(None)
