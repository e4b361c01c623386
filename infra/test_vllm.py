"""Runs the tests that need vLLM and says how it went: the last line of stdout is one JSON object. See `make test-vllm`.

`match_exact_share`: of the requests that the conformance suite sends while blocks are evicted, those for which vLLM found as
many tokens in its prefix cache as its events had told; the least of all engines that it ran on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Count:
    """A pytest plugin."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed = 0
        self.shares: list[float] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed += report.failed
        self.passed += report.passed and report.when == "call"
        if report.when == "call":
            self.shares += [value for name, value in report.user_properties if name == "match_exact_share"]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.failed += report.failed


def main() -> int:
    count = Count()
    status = pytest.main([str(ROOT / "tests" / "vllm"), *sys.argv[1:]], plugins=[count])
    share = min(count.shares) if count.shares else None
    print(json.dumps({"passed": count.passed, "failed": count.failed, "match_exact_share": share}))
    return int(status) or (0 if count.passed else 1)


if __name__ == "__main__":
    sys.exit(main())
