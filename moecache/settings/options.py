"""The options of `open`: the table from which arguments, variables and their help are made."""

from moecache.policies.making import SCOPES
from moecache.policies.registry import policy_names
from moecache.settings import parsers
from moecache.settings.option import Option
from moecache.settings.prefault_modes import DEFAULT_PREFAULT, PREFAULT_MODES, PREFAULT_WORDS

# Those that `open` takes; replays know more.
POLICIES = policy_names()
DEFAULT_POLICY = "echo"
DEFAULT_SCOPE = "global"
DEFAULT_LOADER_THREADS = 2
# Instructions of the kernels, the best last.
KERNEL_LEVELS = ("generic", "neon", "avx2", "avxvnni", "avx512vnni", "avx512", "amx")
# The values of `compute=` that `load` takes.
COMPUTE = {
    "torch": "transformers' own products, its output bit for bit",
    "fast": "moecache's kernels, quicker in decode; sums are rounded otherwise",
}
READ_MODES = ("auto", "buffered", "direct", "mmap")
DEFAULT_READ = "auto"
PREFETCH_MODES = ("auto", "echo", "hints", "last", "off")
DEFAULT_PREFETCH = "auto"
DEFAULT_WARMPIN = "auto"
DEFAULT_WARMPIN_AFTER = 512


def _listed(choices: tuple[str, ...]) -> str:
    return " ".join(f"`{choice}`" for choice in choices)


OPTIONS = {
    option.name: option
    for option in (
        Option(
            "memory",
            parsers.memory,
            "a size such as 4GiB or a share such as 25%",
            None,
            "what is free, less `reserve`",
            'memory for experts: "16GiB", or a share of them, "25%"',
            "`4GiB`, `512MiB`, bytes, or a share of the experts such as `25%`",
            metavar="SIZE",
        ),
        Option(
            "policy",
            parsers.one_of(POLICIES),
            f"one of {', '.join(POLICIES)}",
            DEFAULT_POLICY,
            DEFAULT_POLICY,
            "which expert is evicted",
            f"{_listed(POLICIES)}, see [policies.md](policies.md); the argument also takes a "
            "policy of your own",
            POLICIES,
            "NAME",
            takes_objects=True,
        ),
        Option(
            "scope",
            parsers.one_of(SCOPES),
            f"one of {', '.join(SCOPES)}",
            DEFAULT_SCOPE,
            DEFAULT_SCOPE,
            "whether layers share the slots",
            "`global` (layers compete for slots), `layer` (each has its share)",
            SCOPES,
        ),
        Option(
            "read",
            parsers.one_of(READ_MODES),
            f"one of {', '.join(READ_MODES)}",
            DEFAULT_READ,
            DEFAULT_READ,
            "how experts are read: buffered (through the page cache), direct (around it), mmap "
            "(copied from the mapped file), auto (buffered if memory beside the slots holds all "
            "experts, else direct)",
            f"{_listed(READ_MODES)}, see below",
            READ_MODES,
        ),
        Option(
            "reserve",
            parsers.size,
            "a size such as 2GiB",
            None,
            "trunk, KV cache, buffers, and 1/16 of what is free (32 to 512 MiB; on a GPU 512 MiB)",
            "memory that a plan without --memory leaves free",
            "a size: the memory that a plan without `memory` leaves free",
        ),
        Option(
            "lock",
            parsers.switch,
            "one of on, off",
            False,
            "off",
            "lock the memory (mlock), so that the system keeps it",
            "on or off (1/0, true/false, yes/no, enabled/disabled): mlock the slots",
        ),
        Option(
            "profile",
            str,
            "a path",
            None,
            "none",
            "start warm from what earlier runs kept there, and keep this run's use of experts",
            "a path: findings about the disk, and how experts were used, are kept there "
            "on `close`; see below",
            metavar="FILE",
        ),
        Option(
            "loader_threads",
            parsers.threads,
            "a number of threads",
            None,
            f"{DEFAULT_LOADER_THREADS}; 8 for direct reads without io_uring, up to 12 for a GPU "
            "and cached reads",
            "threads that read experts",
            "0 and up; 0 reads only in the thread that waits; with io_uring a number above 1 "
            "counts as 1",
        ),
        Option(
            "prefault",
            parsers.word(PREFAULT_WORDS),
            f"one of {', '.join(PREFAULT_MODES)}",
            DEFAULT_PREFAULT,
            DEFAULT_PREFAULT,
            "what is brought into memory before the first request",
            f"{_listed(PREFAULT_MODES)}; also 0, false, no, disabled (off) and 1, true, on, yes, "
            "enabled (force)",
        ),
        Option(
            "prefetch",
            parsers.word(
                {
                    **dict.fromkeys(parsers.OFF, "off"),
                    **dict.fromkeys(parsers.ON, DEFAULT_PREFETCH),
                    **{mode: mode for mode in PREFETCH_MODES},
                }
            ),
            f"one of {', '.join(PREFETCH_MODES)}",
            DEFAULT_PREFETCH,
            DEFAULT_PREFETCH,
            "which predictor's guesses are read before a layer asks",
            f"{_listed(PREFETCH_MODES)}, see [prefetch.md](prefetch.md); also 0, false, no, "
            "disabled (off) and 1, true, on, yes, enabled (auto); the argument also takes a "
            "predictor",
        ),
        Option(
            "expert_stats",
            str,
            "a path",
            None,
            "none",
            "write the report there on close",
            "a path: the report is written there on `close`; a path that cannot be written is a "
            "warning",
            is_argument=False,
        ),
        Option(
            "warmpin",
            parsers.pins,
            "a number of experts, auto or off",
            DEFAULT_WARMPIN,
            DEFAULT_WARMPIN,
            "experts of each layer that are pinned, once",
            "experts of each layer to pin, once, after `warmpin_after` accesses; 0 or off: none; "
            "`auto`",
        ),
        Option(
            "warmpin_after",
            parsers.number,
            "a number of accesses",
            DEFAULT_WARMPIN_AFTER,
            str(DEFAULT_WARMPIN_AFTER),
            "accesses, hits and misses together, that are counted before the warm pin",
            "0 and up: accesses, hits and misses together, that are counted before `warmpin` pins",
        ),
        Option(
            "record_trace",
            str,
            "a path",
            None,
            "none",
            "write which experts each token chose, for `moecache replay` (.npz)",
            "a path: the router's choices are written there on `close`, see "
            "[traces.md](traces.md); as a variable, a path that cannot be written is a warning; of "
            "several runtimes the last to close writes it",
            metavar="FILE",
        ),
        Option(
            "threads",
            parsers.cores,
            "a number of threads from 1 to 256",
            None,
            "the cores that the process may use",
            "threads that compute experts (`load` takes `num_threads`)",
            "1 to 256: threads of the kernels; `load` takes `num_threads`",
            is_argument=False,
        ),
        Option(
            "kernels",
            parsers.one_of(KERNEL_LEVELS),
            f"one of {', '.join(KERNEL_LEVELS)}",
            None,
            "the best one that the processor has",
            "instructions that the kernels use",
            f"{_listed(KERNEL_LEVELS)}: instructions that the kernels use, for tests",
            KERNEL_LEVELS,
            is_argument=False,
        ),
    )
}


def markdown_table() -> str:
    """Return the table of docs/settings.md."""
    lines = ["| variable | argument of `moecache.open` | values | default |", "|-|-|-|-|"]
    for option in OPTIONS.values():
        argument = f"`{option.name}`" if option.is_argument else ""
        default = f"`{option.default}`" if option.default in option.choices else option.instead
        lines.append(f"| `{option.variable}` | {argument} | {option.values} | {default} |")
    return "\n".join(lines)
