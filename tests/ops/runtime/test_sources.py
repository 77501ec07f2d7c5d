"""The digest of a compiled kernel's sources: what it imports, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4.ops.attention.sparse_fmha import SPARSE_FMHA
from dsv4.ops.runtime import sources

pytestmark = pytest.mark.stage("op")

FILES = {
    "__init__.py": "from sample.other import unrelated\n",
    "kernels/__init__.py": "",
    "kernels/kit/__init__.py": "",
    "kernels/kit/tma.py": "import cutlass\n",
    "kernels/kit/reduce.py": "def late():\n    from ..kit import swizzle\n",
    "kernels/kit/swizzle.py": "",
    "kernels/kit/unused.py": "",
    "kernels/one.py": "import torch\nimport sample.kernels.kit.tma\nfrom . import two\n",
    "kernels/two.py": "from sample.kernels.kit.reduce import late, other\nfrom .one import late\n",
    "kernels/three.py": "",
    "other/__init__.py": "",
    "other/unrelated.py": "",
}
PART = {
    "sample.kernels",
    "sample.kernels.kit",
    *(f"sample.kernels.kit.{name}" for name in ("tma", "reduce", "swizzle")),
    "sample.kernels.one",
    "sample.kernels.two",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of kernels on the path."""
    for name, text in FILES.items():
        path = tmp_path / "sample" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    sources.digest.cache_clear()
    yield tmp_path / "sample"
    sources.digest.cache_clear()


def digest() -> str:
    """As a fresh process has it."""
    sources.digest.cache_clear()
    return sources.digest("sample.kernels.one")


def test_closure(package: Path) -> None:
    """Absolute and relative imports, packages and names in them, circles, imports in functions."""
    found = sources.closure("sample.kernels.one")
    assert set(found) == PART
    assert found["sample.kernels.two"] == package / "kernels" / "two.py"


@pytest.mark.parametrize("name", sorted(FILES))
def test_digest_follows_exactly_what_is_imported(package: Path, name: str) -> None:
    before = digest()
    assert digest() == before
    path = package / name
    path.write_text(path.read_text() + "changed = 1\n")
    module = ".".join(["sample", *Path(name).with_suffix("").parts]).removesuffix(".__init__")
    assert (digest() != before) == (module in PART)


CODE = '''"""A module."""

import os


class One:
    """A class."""

    places: int  # of something

    def find(self, name="#", other=f"#{os.sep}#") -> str:
        """A method,

        # of several lines.
        """
        text = """first
        # no comment~~~

        last"""  # a comment
        return (
            "a#"  # one
            "b"
        ) + text + 'ä' + "#"
'''.replace("~", " ")
SAME = {
    "comments": [
        ("# of something", "# of another"),
        ("# a comment", ""),
        ("class", "# new\nclass"),
    ],
    "docstrings": [("A module.", "Another."), ("# of several lines.", "#"), ("A class.", "")],
    "lines": [("import os\n", "import os   \n\n"), ("        return", "\n        return")],
}
OTHER = {
    "code": [("places: int", "places: str"), ("import os", "import sys as os")],
    "strings": [("a#", "a"), ('name="#"', 'name="##"'), ('+ "#"', '+ "# "'), ("#{os", "{os")],
    "open strings": [
        ("# no comment   ", "# no comment"),
        ("   \n\n        last", "   \n        last"),
    ],
    "indents": [("        return", "    return")],
}


def digest_of(package: Path, text: str) -> str:
    (package / "kernels" / "one.py").write_text(text)
    return digest()


@pytest.mark.parametrize("kind", SAME)
def test_what_no_compiler_reads_changes_no_digest(package: Path, kind: str) -> None:
    wanted = digest_of(package, CODE)
    for old, new in SAME[kind]:
        assert CODE.count(old) >= 1
        assert digest_of(package, CODE.replace(old, new, 1)) == wanted, (old, new)


@pytest.mark.parametrize("kind", OTHER)
def test_code_and_what_strings_hold_change_the_digest(package: Path, kind: str) -> None:
    wanted = digest_of(package, CODE)
    for old, new in OTHER[kind]:
        assert CODE.count(old) >= 1
        assert digest_of(package, CODE.replace(old, new, 1)) != wanted, (old, new)


def test_lines_count_where_they_are_compiled(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sources.LINE_INFO, "1")
    assert digest_of(package, CODE) != digest_of(package, "\n" + CODE)


def test_a_missing_module_is_named(package: Path) -> None:
    for name in ("sample.kernels.four", "no_such_package.kernels"):
        with pytest.raises(ModuleNotFoundError, match=f"no source of {name}"):
            sources.closure(name)


@pytest.mark.parametrize("arch", sorted(SPARSE_FMHA.kernels))
def test_closures_of_the_attention_kernels(arch: str) -> None:
    """Its own architecture's files, and neither operators nor the host's plans."""
    found = sources.closure(SPARSE_FMHA.kernels[arch])
    own, other = ("sm90", "sm100") if arch == "sm_90a" else ("sm100", "sm90")
    assert {f"dsv4.kernels.attention.{own}.fmha", "dsv4.kernels.kit.args"} <= set(found)
    assert not any(name.startswith("dsv4.ops") for name in found)
    assert "dsv4.kernels.attention.launch_plan" not in found
    strangers = [name for name in found if name.startswith(f"dsv4.kernels.attention.{other}.")]
    assert len(strangers) <= 1, strangers
