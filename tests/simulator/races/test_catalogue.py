"""Each bad kernel of the catalogue has the finding it is listed for, and its cure cures it."""

import pytest

from tests.simulator.helpers.catalogue import CATALOGUE, Example

pytestmark = pytest.mark.stage("simulator")


@pytest.mark.parametrize("example", CATALOGUE, ids=lambda example: example.kind)
def test_example(example: Example) -> None:
    assert example.kind in {found.kind for found in example.findings(example.wrong)}
    assert example.findings(example.right) == []
