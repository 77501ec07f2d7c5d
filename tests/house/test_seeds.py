"""Seeds of tests: the same in every run unless fresh ones are asked for."""

from __future__ import annotations

import pytest

from tests.conftest import seed_of


def test_a_test_keeps_its_seed_and_shares_it_with_no_other() -> None:
    names = [f"tests/test_a.py::test_b[{i}]" for i in range(100)]
    seeds = [seed_of(name, None, fresh=False) for name in names]
    assert seeds == [seed_of(name, None, fresh=False) for name in names]
    assert len(set(seeds)) == len(seeds) and all(0 <= value < 2**31 for value in seeds)


def test_fresh_seeds_differ_and_a_given_one_is_taken() -> None:
    assert len({seed_of("a", None, fresh=True) for _ in range(20)}) == 20
    assert seed_of("a", 7, fresh=True) == seed_of("b", 7, fresh=False) == 7


def test_the_fixture_follows_the_options(request: pytest.FixtureRequest, seed: int) -> None:
    given, fresh = (request.config.getoption(name) for name in ("--seed", "--fresh-seeds"))
    if given is not None:
        assert seed == given
    elif not fresh:
        assert seed == seed_of(request.node.nodeid, None, fresh=False)
