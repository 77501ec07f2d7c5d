"""On machines without the kernel compiler, files that need it are skipped with that reason."""

from __future__ import annotations

import importlib.util

import pytest

COMPILER = "cutlass"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """A file that cannot be imported for want of the kernel compiler is no error."""
    report = yield
    if (
        report.failed
        and isinstance(collector, pytest.Module)
        and importlib.util.find_spec(COMPILER) is None
        and COMPILER in str(report.longrepr)
    ):
        reason = "Skipped: needs the kernel compiler nvidia-cutlass-dsl, which is not installed"
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, reason)
    return report
