"""The processor time of each test file and what it may be: `pytest --budgets`.

Children count once they have ended and were waited for; those of a fork server, as ranks are, do
not. Nor do imports of the tests' modules.
"""

import os
import statistics
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

# Seconds of a processor, as measured; wall time tells nothing on a busy machine.
DEFAULT = 4
BUDGETS = {
    # These compile kernels for the emulator, and one with nvcc, unless an earlier run has.
    "tests/test_cuda_bits.py": 6,
    "tests/test_transformers_device_tokens.py": 12,
    "tests/test_cuda_quantized.py": 7,
    "tests/test_cuda_ungated.py": 8,
    "tests/test_transformers_cuda_quantized.py": 8,
    "tests/test_cuda_experts.py": 6,
    "tests/test_cuda_kernels.py": 8,
    "tests/test_cuda_machine_code.py": 10,
    "tests/test_cuda_tokens.py": 8,
    "tests/test_transformers_cuda_fast.py": 8,
    "tests/test_checkpoint_text_logits.py": 14,
    "tests/test_cli_bench.py": 12,
    "tests/test_cli_without_torch.py": 9,
    "tests/test_transformers_decoding.py": 9,
    "tests/test_transformers_program_prompts.py": 8,
    "tests/test_transformers_families.py": 9,
    "tests/test_transformers_gguf.py": 12,
    "tests/test_transformers_quantized.py": 9,
    "tests/test_cli_chat.py": 11,
    "tests/test_serving_fields.py": 9,
    "tests/test_serving_grammars.py": 9,
    "tests/test_packing_resume.py": 7,
    "tests/test_serving_limits.py": 7,
    "tests/test_transformers_fast.py": 6,
    "tests/test_transformers_generation.py": 6,
    "tests/test_transformers_prompts.py": 6,
    "tests/test_transformers_sequences.py": 6,
    "tests/test_transformers_span_graphs.py": 6,
    "tests/test_transformers_token_graph.py": 7,
    "tests/test_transformers_recipes.py": 7,
    "tests/test_cli_generate.py": 6,
    "tests/test_gguf_text_logits.py": 7,
    "tests/test_gpu_model.py": 6,
    "tests/test_cli.py": 5,
    "tests/test_docs_examples.py": 5,
    "tests/test_echo_oracle.py": 5,
    "tests/test_gpu_script.py": 7,
    "tests/test_serving.py": 5,
    "tests/test_serving_page.py": 5,
    "tests/test_serving_parallel.py": 5,
    "tests/test_serving_without_torch.py": 5,
    "tests/test_transformers_compile.py": 5,
}
# A run fails above this many times its budget: a busy sibling core counts.
FACTOR = 3
# So many of the files above tell how slow a run's machine is: by the median of their shares.
MIN_FILES = 10
NUM_SHOWN = 25
PROPERTY = "cpu_seconds"


def cpu_seconds() -> float:
    """Return the processor time of this process and of those of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Budgets:
    """Adds up what the phases of each file's tests took; a plug-in of pytest."""

    def __init__(self) -> None:
        self.files = Counter[str]()
        self.num_tests = Counter[str]()
        self._last = cpu_seconds()

    def pytest_runtest_logstart(self) -> None:
        """Begin an item; what happened since the last one belongs to no file."""
        self._last = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, pytest.TestReport]:
        """Write into a phase's report what it took, so that it reaches the process that adds up."""
        report: pytest.TestReport = yield
        now = cpu_seconds()
        report.user_properties.append((PROPERTY, now - self._last))
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase to its file."""
        file = report.nodeid.split("::", maxsplit=1)[0]
        self.num_tests[file] += report.when == "call"
        self.files[file] += sum(value for name, value in report.user_properties if name == PROPERTY)

    def slowness(self) -> float:
        """Return how many times its budget a file takes on this machine, at least 1."""
        shares = [self.files[file] / BUDGETS[file] for file in self.files if file in BUDGETS]
        return max(1.0, statistics.median(shares)) if len(shares) >= MIN_FILES else 1.0

    def over_budget(self) -> list[str]:
        """Return a line for each file that took too long."""
        factor = FACTOR * self.slowness()
        return [
            f"{file} took {seconds:.1f} s of processor time, and may take"
            f" {factor:.1f} * {budget:g} s on this machine (tests/helpers/budgets.py)"
            for file, seconds in self.files.most_common()
            if seconds > factor * (budget := BUDGETS.get(file, DEFAULT))
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that passed, if a file took too long."""
        if self.over_budget() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the most expensive files, and those over their budget."""
        terminalreporter.section("processor time")
        for file, seconds in self.files.most_common(NUM_SHOWN):
            terminalreporter.write_line(f"{seconds:7.1f} s {self.num_tests[file]:5d} {file}")
        total, tests = self.files.total(), self.num_tests.total()
        terminalreporter.write_line(f"{total:7.1f} s {tests:5d} all files")
        for line in self.over_budget():
            terminalreporter.write_line(line, red=True)
