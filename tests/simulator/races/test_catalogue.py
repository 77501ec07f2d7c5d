"""Each bad kernel of the catalogue has the finding it is listed for, and its cure cures it."""

from pathlib import Path

import pytest

from tests.simulator.helpers.catalogue import CATALOGUE, Example

pytestmark = pytest.mark.stage("simulator")


@pytest.mark.parametrize("example", CATALOGUE, ids=lambda example: example.kind)
def test_example(example: Example) -> None:
    assert example.kind in {found.kind for found in example.findings(example.wrong)}
    assert example.findings(example.right) == []


def test_the_tables_of_the_docs_have_the_same_kinds() -> None:
    """Findings in the first one, warnings in the second."""
    text = (Path(__file__).parents[3] / "docs" / "simulator.md").read_text()
    for heading, warns in (("| finding |", False), ("| warning |", True)):
        rows = text[text.index(heading) :].partition("\n\n")[0].splitlines()[2:]
        kinds = {kind.strip() for row in rows for kind in row.split("|")[1].split(",")}
        assert kinds == {example.kind for example in CATALOGUE if example.warns == warns}
