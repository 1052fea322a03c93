"""Turns: whose answers are generated, and who waits."""

import asyncio
from dataclasses import dataclass
from typing import Any

from moecache.decoding.prefixes import PrefixCache
from moecache.serving.answer import Answer
from moecache.serving.errors import RequestError
from moecache.serving.model import ServedModel

# Tokens of an answer for which there has to be memory when its turn comes: few have more.
COUNTED_TOKENS = 1024
# Memory comes free without an answer's end, too.
_LOOK_S = 1.0


@dataclass(eq=False)
class Turn:
    """A request that waits, or whose answer is generated.

    Attributes
    ----------
    come : Future
        Done once it is its turn.
    num_tokens : int
        Of its prompt, and those of its answer that count.
    answer : Answer or None
    """

    come: "asyncio.Future[None]"
    num_tokens: int
    answer: Answer | None = None

    @property
    def num_unwritten(self) -> int:
        """Tokens whose keys and values are still to come."""
        stream = None if self.answer is None else self.answer.stream
        written = 0 if stream is None else stream.read_tokens + len(stream.tokens)
        return max(0, self.num_tokens - written)


class Turns:
    """Some requests are answered at a time; others wait, in the order in which they came.

    One that is answered beside others has memory for its keys and values; else it waits until
    there is some. All methods are called in the event loop.

    Parameters
    ----------
    model : ServedModel
    most : int
        Turns at a time.
    prefixes : PrefixCache, optional
        Whose memory is not free, though it is not used yet.
    """

    def __init__(self, model: ServedModel, most: int, prefixes: PrefixCache | None = None) -> None:
        self._model = model
        self._prefixes = prefixes
        self._most = most
        self._waiting: list[Turn] = []
        self._turns: list[Turn] = []

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def num_free(self) -> int:
        """Requests that could be answered at once."""
        return 0 if self._waiting else self._most - len(self._turns)

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The answers that are being generated, the oldest first."""
        return tuple(turn.answer for turn in self._turns if turn.answer is not None)

    async def take(self, num_tokens: int, gone: "asyncio.Future[Any]") -> Turn | None:
        """Return a turn once it has come; `None` if the client has left.

        Parameters
        ----------
        num_tokens : int
            Of a prompt, and of its answer.
        gone : Future
            Done once the client has left.

        Raises
        ------
        RequestError
            If the server is about to end.
        """
        if gone.done():
            return None
        turn = Turn(asyncio.get_running_loop().create_future(), num_tokens)
        self._waiting.append(turn)
        try:
            self._pass_on()
            while not turn.come.done() and not gone.done():
                await asyncio.wait(
                    (turn.come, gone), timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                self._pass_on()
        except BaseException:
            self.give_up(turn)
            raise
        if gone.done():
            self.give_up(turn)
            return None
        turn.come.result()
        return turn

    def end(self, answer: Answer) -> None:
        """Pass on the turn of an answer that has ended."""
        self._turns = [turn for turn in self._turns if turn.answer is not answer]
        self._pass_on()

    def refuse(self, error: RequestError) -> int:
        """End the wait of all who wait; return how many they were."""
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            turn.come.set_exception(error)
        return len(waiting)

    def give_up(self, turn: Turn) -> None:
        """Leave the queue, or pass a turn on that has come."""
        for held in (self._waiting, self._turns):
            if turn in held:
                held.remove(turn)
        if turn.come.done():
            turn.come.exception()  # nobody asks for it any more
        self._pass_on()

    def _pass_on(self) -> None:
        """Give turns to those that have waited longest, as far as there are some, and memory."""
        while self._waiting and len(self._turns) < self._most and self._fits(self._waiting[0]):
            turn = self._waiting.pop(0)
            self._turns.append(turn)
            turn.come.set_result(None)

    def _fits(self, turn: Turn) -> bool:
        """Return whether there is memory for keys and values beside those of all turns."""
        if not self._turns:
            return True
        wanted = turn.num_tokens + sum(each.num_unwritten for each in self._turns)
        free: int = self._model.runtime.borrowed.room_bytes()
        if self._prefixes is not None:
            free -= max(0, self._prefixes.max_bytes - self._prefixes.stats().nbytes)
        return wanted * self._model.bytes_per_token <= free
