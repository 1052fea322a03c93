"""ComputeStats: who multiplies, how much weight a token takes, and how fast that is read."""

from dataclasses import dataclass

from moecache.units import format_bytes


@dataclass(frozen=True)
class ComputeStats:
    """The multiplier of a model's experts, and how near it comes to the memory's bandwidth.

    Attributes
    ----------
    compute : {"torch", "fast"}
    level : str
        Instructions of the kernels, "cuda" for those of a GPU; empty with "torch".
    num_threads : int
        0 on a GPU.
    formats : tuple of str
        Formats of the experts' matrices in their slots.
    expert_bytes, trunk_bytes : int
        Weights that one token multiplies: those of its experts, and of the linear layers of
        the trunk. 0: not known.
    bytes_computed, busy_ns : int
        Weights of experts that the kernels multiplied with a single token, and the time that
        took. Prompts, which use a weight for many tokens, do not count.
    bytes_per_s : float or None
        This machine's reads from memory; `None` if nobody has measured them.
    left_to_torch : str
        How many layers torch computes although kernels were asked for, and why.
    """

    compute: str
    level: str
    num_threads: int
    formats: tuple[str, ...]
    expert_bytes: int
    trunk_bytes: int = 0
    bytes_computed: int = 0
    busy_ns: int = 0
    bytes_per_s: float | None = None
    left_to_torch: str = ""

    @property
    def bytes_per_token(self) -> int:
        """Weights that one token multiplies."""
        return self.expert_bytes + self.trunk_bytes

    @property
    def reached_bytes_per_s(self) -> float:
        """Weights of experts that decoding multiplied per second of doing so; 0.0 before."""
        return self.bytes_computed / (self.busy_ns / 1e9) if self.busy_ns else 0.0

    @property
    def bandwidth_share(self) -> float | None:
        """The same as a share of what this machine reads; `None` if one is not known."""
        if not self.bytes_per_s or not self.busy_ns:
            return None
        return self.reached_bytes_per_s / self.bytes_per_s

    def describe(self) -> str:
        """Return it as one line."""
        who = "torch" if self.compute == "torch" else f"kernels: {self.level}"
        threads = f", {self.num_threads} thread{'s' if self.num_threads != 1 else ''}"
        threads = threads if self.num_threads else ""
        parts = [f"computed by {who}{threads}", " and ".join(self.formats)]
        if self.left_to_torch:
            parts.insert(1, self.left_to_torch)
        weights = f"{format_bytes(self.bytes_per_token)} of weights per token"
        if self.trunk_bytes:
            weights += (
                f" (experts {format_bytes(self.expert_bytes)}, trunk "
                f"{format_bytes(self.trunk_bytes)})"
            )
        if self.bytes_per_token:
            parts.append(weights)
        if self.busy_ns:
            rate = f"{format_bytes(self.reached_bytes_per_s)}/s"
            parts.append(f"experts of single tokens at {rate}")
        if self.bytes_per_s:
            share = self.bandwidth_share
            machine = f"{format_bytes(self.bytes_per_s)}/s that this machine reads"
            if share is not None:
                parts[-1] += f", {share:.0%} of the {machine}"
            elif self.bytes_per_token:
                most = self.bytes_per_s / self.bytes_per_token
                parts.append(f"the {machine} allow {most:.1f} tokens/s")
        return "; ".join(parts)
