"""The simulated device beside a reckoning nanosecond by nanosecond."""

from hypothesis import given
from hypothesis import strategies as st

from moecache.loading._load import Load
from tests.helpers.devices import Bench, bench

# When a read begins, its bytes (one per nanosecond), and how much later a demand asks for it.
Read = tuple[int, int, int | None]
BEGIN, JOIN = 0, 1

reads = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 200), st.sampled_from([0, None, 1, 20, 70, 150])),
    min_size=1,
    max_size=12,
)
latencies, chunks = st.integers(0, 60), st.integers(1, 80)


def events(reads: list[Read]) -> list[tuple[int, int, int]]:
    """Return (time, what, number) of all that is asked of the device, in its order."""
    begun = [(begin, BEGIN, number) for number, (begin, _, _) in enumerate(reads)]
    joined = [(begin + after, JOIN, n) for n, (begin, _, after) in enumerate(reads) if after]
    return sorted(begun + joined)


class Reckoning:
    """Plain Python that looks at every nanosecond."""

    def __init__(self, reads: list[Read], latency_ns: int, chunk: int) -> None:
        self.left = [size for _, size, _ in reads]
        self.chunk = chunk
        self.ready_at: dict[int, int] = {}
        self.order: dict[int, int] = {}
        self.urgent: set[int] = set()
        self.ends: dict[int, int] = {}
        self.holder: int | None = None
        self.sent = self.num_overtaken = self.now = 0
        todo = events(reads)
        while len(self.ends) < len(reads):
            # Twice: with what was asked before this moment, and with what is asked now.
            self.choose()
            while todo and todo[0][0] == self.now:
                _, what, number = todo.pop(0)
                if number in self.ends:
                    continue
                self.order[number] = -len(todo)
                if what == BEGIN:
                    self.ready_at[number] = self.now + latency_ns
                if what == JOIN or reads[number][2] == 0:
                    self.urgent.add(number)
            self.choose()
            self.send()

    def choose(self) -> None:
        """Give the link to the read whose turn it is."""
        ready = [
            (number not in self.urgent, self.order[number], number)
            for number, since in self.ready_at.items()
            if since <= self.now and number not in self.ends
        ]
        if not ready:
            return
        is_prefetch, _, first = min(ready)
        if self.holder is None:
            self.holder, self.sent = first, 0
        elif not is_prefetch and self.holder not in self.urgent and self.sent % self.chunk == 0:
            self.num_overtaken += self.sent > 0
            self.holder, self.sent = first, 0

    def send(self) -> None:
        """Let a nanosecond pass."""
        self.now += 1
        if self.holder is None:
            return
        self.sent += 1
        self.left[self.holder] -= 1
        if self.left[self.holder] == 0:
            self.ends[self.holder] = self.now
            self.holder = None


def play(reads: list[Read], latency_ns: int, chunk: int) -> Bench:
    """Ask everything at its time, and let everything happen."""
    sizes = [size for _, size, _ in reads]
    made = bench(sizes, latency_ns=latency_ns, chunk_bytes=chunk)
    loads: dict[int, Load] = {}
    for time, what, number in events(reads):
        made.clock.advance(time - made.clock())
        if what == JOIN:
            made.device.hasten(loads[number])
        elif reads[number][2] == 0:
            made.demand(number, layer=number)
        else:
            loads[number] = made.prefetch(number, layer=number)
    made.run_out()
    return made


@given(reads=reads, latency_ns=latencies, chunk=chunks)
def test_every_read_ends_when_reckoned(reads: list[Read], latency_ns: int, chunk: int) -> None:
    """To the nanosecond, and the same each time."""
    reckoned = Reckoning(reads, latency_ns, chunk)

    made = play(reads, latency_ns, chunk)

    assert dict(made.finished) == reckoned.ends
    assert made.device.num_overtaken == reckoned.num_overtaken
    assert play(reads, latency_ns, chunk).spans == made.spans


@given(reads=reads, latency_ns=latencies, chunk=chunks)
def test_the_link_transfers_one_read_at_a_time_and_never_rests(
    reads: list[Read], latency_ns: int, chunk: int
) -> None:
    """Spans do not overlap, have every byte once, and leave no gap while a read is ready."""
    made = play(reads, latency_ns, chunk)

    sent = dict.fromkeys(range(len(reads)), 0)
    free_from = 0
    for number, start, end in made.spans:
        ready = [
            begun + latency_ns for other, (begun, size, _) in enumerate(reads) if sent[other] < size
        ]
        assert start == max(free_from, min(ready))
        sent[number] += end - start
        free_from = end
    assert list(sent.values()) == [size for _, size, _ in reads]
    assert made.device.busy_ns == sum(sent.values())


@given(reads=reads, latency_ns=latencies, chunk=chunks)
def test_no_chunk_of_a_prefetch_begins_while_a_demand_is_ready(
    reads: list[Read], latency_ns: int, chunk: int
) -> None:
    """It waits for the rest of one chunk at most."""
    made = play(reads, latency_ns, chunk)

    ends = dict(made.finished)
    for number, start, end in made.spans:
        begun, _, after = reads[number]
        last_chunk = end - 1 - (end - 1 - start) % chunk
        if after is not None and begun + after <= last_chunk:
            continue
        assert not [
            other
            for other, (since, _, asked) in enumerate(reads)
            if asked == 0 and since + latency_ns <= last_chunk < ends[other]
        ]


@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=12),
    latency_ns=latencies,
    chunk=chunks,
)
def test_demands_of_one_moment_take_their_sum(
    sizes: list[int], latency_ns: int, chunk: int
) -> None:
    """And one latency."""
    made = play([(0, size, 0) for size in sizes], latency_ns, chunk)

    assert made.clock() == latency_ns + sum(sizes)
