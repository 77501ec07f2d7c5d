"""Fixtures and the collection rules that every test file shares."""

from __future__ import annotations

import secrets

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests, with the reason, on machines without the GPU they need."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    needs = {"gpu": None, "sm90": (9, 0), "sm100": (10, 0)}
    for item in items:
        for marker, required in needs.items():
            if item.get_closest_marker(marker) is None:
                continue
            if capability is None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, none is available"))
            elif required is not None and capability != required:
                item.add_marker(
                    pytest.mark.skip(
                        reason=f"needs compute capability {required}, got {capability}"
                    )
                )


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed each run, printed with a failure; `--seed N` repeats one."""
    value = request.config.getoption("--seed")
    value = secrets.randbits(31) if value is None else value
    torch.manual_seed(value)
    print(f"seed {value} (repeat with --seed {value})")
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="use this seed instead of a fresh one")
