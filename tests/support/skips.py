"""Skipped tests, listed by reason. With --strict-skips a reason that is not in `ALLOWED` fails the run, as in CI."""

from __future__ import annotations

import re
from collections import Counter

import pytest

# Patterns of the reasons for which CI may skip tests, and who runs these tests instead. Packages and programs that CI
# installs are not among them.
ALLOWED = {
    r"there is no NVIDIA device here": "make test-all where there is a device (docs/gpu.md)",
    r"the CPU at hand (lacks|has no) .*": "CI on a machine whose CPU has the instructions",
    r"this kernel has no Landlock( of ABI 6)?": "CI on a machine whose kernel has it",
    r"root may read everything": "make test by any other user",
    r"this process has no rights to give up": "CI, which runs as root",
}


# Programs that tests run, and the Debian packages of .ci/run that have them.
PACKAGES = {
    "gcc": "gcc",
    "g++": "g++",
    "clang": "clang",
    "clang++": "clang",
    "zsh": "zsh",
    "fish": "fish",
    "node": "nodejs",
    "chromium": "chromium",
}


def who_runs(reason: str) -> str | None:
    """Return who runs the tests that are skipped for a reason, or None if the reason is not allowed."""
    return next((runner for pattern, runner in ALLOWED.items() if re.fullmatch(pattern, reason)), None)


class SkipReport:
    """Counts skipped tests and modules by reason, and lists them at the end of the run."""

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.skipped: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._count(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._count(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.strict and self._refused() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.skipped:
            return
        terminalreporter.section(f"{self.skipped.total()} skipped, by reason")
        others = "nobody" if self.strict else "CI"
        for reason, count in self.skipped.most_common():
            terminalreporter.line(f"{count:5} {reason}; run by: {who_runs(reason) or others}")
        if self.strict and (refused := self._refused()):
            terminalreporter.line(
                f"ERROR: {len(refused)} of these reasons are not allowed in CI: install in .ci/run what is missing, "
                "or add the reason to tests/support/skips.py with who runs the tests instead",
                red=True,
            )

    def _count(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        assert isinstance(report.longrepr, tuple)  # path, line, reason
        self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def _refused(self) -> list[str]:
        return [reason for reason in self.skipped if who_runs(reason) is None]
