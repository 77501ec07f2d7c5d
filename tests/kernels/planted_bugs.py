"""Tests that bugs planted in a kernel are noticed, for the test modules of kernels to name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import pytest

from dsv4.testing.mutate import Edit, check, mutated


def tests_of(
    bugs: Mapping[str, Edit], module: str, checked: Callable[[Callable, int], None]
) -> tuple[Callable, Callable, Callable]:
    """`test_bug_has_its_place`, `test_bug_is_noticed`, `test_without_a_bug_nothing_is_noticed`.

    Args:
        bugs: by name.
        module: of the kernel, with a function `build`.
        checked: runs what such a `build` compiles, with a seed, under the checks of every test.
    """

    def noticed(build: Callable, seed: int) -> bool:
        """Whether the simulator or a comparison finds the run to be wrong."""
        from dsv4.simulator.errors import Deadlock, KernelFault

        try:
            checked(build, seed)
        except (AssertionError, Deadlock, KernelFault):
            return True
        return False

    @pytest.mark.parametrize("name", bugs)
    def has_its_place(name: str) -> None:
        """What is renamed in the kernel is found here at once."""
        check(bugs[name])

    @pytest.mark.slow
    @pytest.mark.parametrize("name", bugs)
    def is_noticed(tmp_path: Path, name: str, seed: int) -> None:
        assert noticed(mutated(_build(module), tmp_path, bugs[name]), seed), name

    @pytest.mark.slow
    def nothing_is_noticed(seed: int) -> None:
        assert not noticed(_build(module), seed)

    return has_its_place, is_noticed, nothing_is_noticed


def _build(module: str) -> Callable:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    return import_module(module).build
