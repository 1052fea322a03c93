"""Network: how long rows take from every rank to every other one."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from moecache.errors import ConfigError
from moecache.units import format_bytes_per_s, format_ns, parse_ns

# What 1538 bytes on an Ethernet cable carry of TCP: a frame's payload of 1500 without IP's and
# TCP's headers with timestamps (52), beside Ethernet's header, checksum, preamble and gap (38).
TCP_SHARE = 1448 / 1538
# Gbit/s of the cable, and from one program's send to the other's receive, through the kernel
# and one switch: an assumption, for which a measured figure should be given where there is one.
_KNOWN = {
    "1GbE": (1, 60_000),
    "2.5GbE": (2.5, 50_000),
    "5GbE": (5, 40_000),
    "10GbE": (10, 30_000),
    "25GbE": (25, 25_000),
    "40GbE": (40, 20_000),
    "100GbE": (100, 15_000),
    "200GbE": (200, 12_000),
    "400GbE": (400, 10_000),
}
NETWORKS = tuple(_KNOWN)
MAX_GBIT_PER_S = 10**6
MAX_LATENCY_NS = 10**12


@dataclass(frozen=True)
class Network:
    """A network on which all ranks send at the same time, each to its neighbour.

    Attributes
    ----------
    name : str
    bandwidth : float
        Bytes per second of each rank's link, each way, as a program sees them.
    latency_ns : int
        From one program's send to the other's receive.

    Notes
    -----
    A message of n bytes takes latency + n / bandwidth (Hockney 1994, Parallel Computing 20). The
    all-gather is a ring: of R ranks, each passes on what it got last, R - 1 times, so that it
    takes (R - 1) (latency + m / bandwidth), where m is the largest part of a rank, to which
    the others' parts are padded (Thakur, Rabenseifner and Gropp 2005, Int. J. High Performance
    Computing Applications 19, section 3).
    """

    name: str
    bandwidth: float
    latency_ns: int

    @classmethod
    def parse(cls, given: "str | Network") -> "Network":
        """Return the network of a name, or of a rate and a latency.

        Parameters
        ----------
        given : str or Network
            A name of `NETWORKS`, such as "10GbE", whose bandwidth is what TCP leaves of it; or
            "40Gbit/s:5us": what a program gets, and after how long. Without a time, the latency
            of the slowest name that is as fast.

        Raises
        ------
        ConfigError
            If it is neither.
        """
        if isinstance(given, Network):
            return given
        text = given.strip() if isinstance(given, str) else ""
        for name, (gbit, latency_ns) in _KNOWN.items():
            if text.lower() == name.lower():
                return cls(name, gbit * 1e9 / 8 * TCP_SHARE, latency_ns)
        rate, _, time = text.partition(":")
        match = re.fullmatch(r"(\d{1,7}(?:\.\d{1,9})?)\s*(?:G|Gb|Gbit)?(?:/s|ps)?", rate.strip())
        if match is None or not 0 < float(match[1]) <= MAX_GBIT_PER_S or (":" in text and not time):
            raise ConfigError(
                f"network {given!r:.80} is neither one of {', '.join(NETWORKS)} nor a rate in "
                "Gbit/s with a latency, such as 40Gbit/s:5us"
            )
        gbit = float(match[1])
        latency_ns = parse_ns(time.strip()) if time else _latency_of(gbit)
        if latency_ns > MAX_LATENCY_NS:
            raise ConfigError(
                f"network {given!r:.80}: a latency is at most {format_ns(MAX_LATENCY_NS)}"
            )
        return cls(text, gbit * 1e9 / 8, latency_ns)

    def gather_ns(self, part_bytes: Sequence[int]) -> int:
        """Return how long it takes until every rank has the parts of all.

        Parameters
        ----------
        part_bytes : sequence of int
            Bytes of each rank's part.
        """
        hops = len(part_bytes) - 1
        if hops < 1:
            return 0
        return hops * (self.latency_ns + math.ceil(max(part_bytes) * 1e9 / self.bandwidth))

    def gather_bytes(self, part_bytes: Sequence[int]) -> int:
        """Return how many bytes each rank sends for that, and receives."""
        return (len(part_bytes) - 1) * max(part_bytes) if part_bytes else 0

    def describe(self) -> str:
        """Return name, bandwidth and latency as text."""
        return f"{self.name}: {format_bytes_per_s(self.bandwidth)}, {format_ns(self.latency_ns)}"


def _latency_of(gbit: float) -> int:
    slower = [latency_ns for known, latency_ns in _KNOWN.values() if known <= gbit]
    return min(slower) if slower else _KNOWN["1GbE"][1]
