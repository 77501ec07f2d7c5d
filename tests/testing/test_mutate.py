"""Mutations: addresses that survive moves, edits that move no line, and errors that help."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsv4.testing.mutate import Edit, MutationError, at, check, mutated

PACKAGE = "house_of_mutations"
FILES = {
    "__init__.py": "",
    "kit/__init__.py": "",
    "kit/numbers.py": '''
        """Größen."""


        def scaled(x, factor):
            return x * factor


        def twice(x):
            return x * 2
        ''',
    "sm90/__init__.py": "",
    "sm90/rows.py": f"""
        from {PACKAGE}.kit import numbers


        def finish(log):
            log("sm90")
            log.append
            return 90
        """,
    "sm100/__init__.py": "",
    "sm100/rows.py": f'''
        """What {PACKAGE}.kit does not know: {PACKAGE}_of_others stays."""

        from {PACKAGE}.kit.numbers import scaled, twice


        class Rows:
            """Ü rows."""

            def run(self, log, limit):
                log("a"); log("ä", twice(
                    limit
                ))  # trailing
                total = 0
                for i in range(limit):
                    if i > 2:
                        self.wait(log, i)
                        log("after")
                    total = total + scaled(
                        i,
                        factor=10,
                    )
                return total, self.line()

            def wait(self, log, i):
                if i:
                    log("wait")

            def line(self):
                import inspect
                return inspect.currentframe().f_lineno


        def finish(log):
            log("sm100")
            return 100


        def run(limit):
            said = []
            result = Rows().run(lambda *words: said.append(words[0]), limit)
            return said, result, finish(said.append)
        ''',
}
SAID, RESULT = ["a", "ä", "wait", "after", "sm100"], 60  # of 4 rounds


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package that can be imported."""
    root = tmp_path / "sources" / PACKAGE
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(root.parent))
    yield root
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]


def run_of(house: Path, module: str = "rows") -> Callable:
    return __import__(f"{PACKAGE}.sm100.{module}", fromlist=["run"]).run


def outcome(house: Path, tmp_path: Path, *edits: Edit) -> tuple[list[str], int, int]:
    """What the changed copy says and returns for 4 rounds, and the number of a line in it."""
    run = run_of(house)
    twin = mutated(run, tmp_path, *edits, package=PACKAGE)
    said, (total, line), finished = twin(4)
    assert run(4)[0] == SAID and run(4)[1][0] == RESULT, "the original has changed"
    assert line == run(4)[1][1], "lines have moved"
    assert Path(inspect.getsourcefile(twin)).is_relative_to(tmp_path)
    return said, total, finished


RUN = at("Rows.run")


def test_the_copy_alone_behaves_as_the_original(house: Path, tmp_path: Path) -> None:
    assert outcome(house, tmp_path) == (SAID, RESULT, 100)
    copies = [m for n, m in sys.modules.items() if n.startswith(f"{PACKAGE}_mutated")]
    text = next(inspect.getsource(m) for m in copies if m.__name__.endswith("sm100.rows"))
    assert f"{PACKAGE}_of_others stays" in text and f"{PACKAGE}.kit" not in text


@pytest.mark.parametrize(
    ("edit", "said", "total"),
    [
        (RUN.call("self.wait").delete(), ["a", "ä", "after", "sm100"], 60),
        (RUN.call("wait").delete(), ["a", "ä", "after", "sm100"], 60),
        (RUN.call("log", nth=1).delete(), ["a", "wait", "after", "sm100"], 60),
        (RUN.branch("i > 2").delete(), ["a", "ä", "sm100"], 60),
        (RUN.branch("i > 2").call("log").delete(), ["a", "ä", "wait", "sm100"], 60),
        (RUN.branch("(i>2)").test.replace("i > 3"), ["a", "ä", "sm100"], 60),
        (RUN.branch("i > 2").swap_with_next(), SAID, 60),
        (
            RUN.branch("i > 2").call("wait").swap_with_next(),
            ["a", "ä", "after", "wait", "sm100"],
            60,
        ),
        (RUN.call("log", nth=0).swap_with_next(), ["ä", "a", "wait", "after", "sm100"], 60),
        (RUN.assignment("total", nth=1).value.replace("i"), SAID, 3),
        (RUN.assignment("total", nth=1).value.replace("{} - 1"), SAID, 56),
        (RUN.call("scaled").argument(0).replace("i + 1"), SAID, 100),
        (RUN.call("scaled").argument("factor").replace("1"), SAID, 6),
        (RUN.call("scaled").replace("7"), SAID, 28),
        (RUN.expression("10").replace("1 + 1"), SAID, 12),
        (RUN.expression("total + scaled(i, factor=10)").replace("total"), SAID, 0),
        (
            RUN.call("self.wait").replace("log('x')\nlog('y')"),
            ["a", "ä", "x", "y", "after", "sm100"],
            60,
        ),
        (at("scaled").expression("factor").replace("factor + 1"), SAID, 66),
        (at("kit.numbers:scaled").expression("x * factor").replace("x"), SAID, 6),
    ],
    ids=lambda value: str(value.place) if isinstance(value, Edit) else "",
)
def test_edit_changes_what_it_says(
    house: Path, tmp_path: Path, edit: Edit, said: list[str], total: int
) -> None:
    check(edit, package=PACKAGE)
    assert outcome(house, tmp_path, edit) == (said, total, 100)


def test_several_edits_of_one_file(house: Path, tmp_path: Path) -> None:
    edits = (
        RUN.call("wait").delete(),
        RUN.call("log", nth=0).delete(),
        RUN.expression("2").replace("0"),
    )
    said, total, _ = outcome(house, tmp_path, *edits)
    assert (said, total) == (["ä", "after", "after", "after", "sm100"], RESULT)
    with pytest.raises(MutationError, match="overlap"):
        check(RUN.branch("i > 2").delete(), RUN.call("wait").delete(), package=PACKAGE)


def test_rest_of_the_address_decides_between_modules(house: Path, tmp_path: Path) -> None:
    edit = at("finish").expression("100").replace("7")
    assert outcome(house, tmp_path, edit)[2] == 7
    with pytest.raises(MutationError, match=r"sm100\.rows:finish \(line \d+\): line \d+ \| sm90"):
        check(at("finish").call("log").delete(), package=PACKAGE)
    check(at("sm100.rows:finish").call("log").delete(), package=PACKAGE)
    # In one of the modules it is there once, in the other several times.
    with pytest.raises(MutationError, match=r"\| sm90\.rows"):
        check(at("finish").expression("log").replace("print"), package=PACKAGE)


def test_moved_module_changes_nothing(house: Path, tmp_path: Path) -> None:
    moved = house / "sm100" / "elsewhere" / "lines.py"
    moved.parent.mkdir()
    (moved.parent / "__init__.py").touch()
    (house / "sm100" / "rows.py").rename(moved)
    run = run_of(house, "elsewhere.lines")
    twin = mutated(run, tmp_path, RUN.call("wait").delete(), package=PACKAGE)
    assert twin(4)[0] == ["a", "ä", "after", "sm100"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            at("Rows.runs").call("log").delete(),
            ('no function "Rows.runs"', "sm100.rows:Rows.run (line"),
        ),
        (at("Row.wait").call("log").delete(), ('no function "Row.wait"', "Rows.wait")),
        (
            at("sm90.rows:Rows.run").call("log").delete(),
            ("sm90.rows:Rows.run", "sm100.rows:Rows.run"),
        ),
        (
            RUN.call("log").delete(),
            ('call("log") is there 3 times', "line 11 `log('a')`", "line 18 "),
        ),
        (RUN.call("log", nth=3).delete(), ('no call("log", nth=3), only', "line 18 ")),
        (
            RUN.call("halt").delete(),
            ('at("Rows.run").call("halt")', "Rows.run (line 10)", "line 17 `self.wait("),
        ),
        (RUN.assignment("sum").delete(), ('no assignment("sum")', "line 14 `total = 0`")),
        (RUN.branch("i > 3").delete(), ('no branch("i > 3")', "line 16 `if i > 2:`")),
        (RUN.expression("limits").replace("1"), ('no expression("limits")', "`limit`")),
        (
            RUN.call("scaled").argument(2).replace("1"),
            ("`scaled(i, factor=10)` has no argument(2)",),
        ),
        (RUN.call("scaled").argument("by").replace("1"), ("has no argument('by')",)),
        (RUN.call("scaled").delete(), ("`scaled(i, factor=10)` is no statement",)),
        (RUN.call("wait").replace("if i:\n    log(i)"), ("lines would move",)),
        (RUN.call("wait").replace("log("), ("`log(` is no Python",)),
        (RUN.branch("i > 2").replace("i"), ("is no expression",)),
        (RUN.call("log", nth=2).swap_with_next(), ("`log('after')` is the last statement",)),
        (RUN.delete(), ("is no statement",)),
    ],
    ids=lambda value: str(value.place) if isinstance(value, Edit) else "",
)
def test_what_is_not_there_is_told_with_what_is(
    house: Path, edit: Edit, words: tuple[str, ...]
) -> None:
    with pytest.raises(MutationError) as caught:
        check(edit, package=PACKAGE)
    for word in words:
        assert word in str(caught.value)


def test_package_that_is_none_is_refused() -> None:
    with pytest.raises(MutationError, match="package: textwrap is not one"):
        check(RUN.delete(), package="textwrap")
