"""Exit statuses of `dsv4 sim`."""

from __future__ import annotations

CHECK_FAILED = 1  # wrong, racy, or stopped by a fault
NOT_COVERED = 2  # right as far as these inputs reach
