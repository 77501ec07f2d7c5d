"""The command line of `scripts/same_code`: trees, compilations and the report."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.tools import code_probe
from scripts.tools.code_cache import CodeCache, Tree
from scripts.tools.code_text import (
    canonical_host,
    canonical_ptx,
    first_difference,
    is_renumbered,
    unified_diff,
)

WORKTREE = "worktree"
# As it was when this process started: a run takes minutes, and may not change its mind meanwhile.
_PROBE = Path(code_probe.__file__).read_text()
DIFF_LINES = 40
LINE_LENGTH = 150  # of a differing line in the report


class UsageError(Exception):
    """What is wrong with the command line, in one line."""


@dataclass(frozen=True)
class Verdict:
    """What became of one configuration; `verdict` "equal" is the only good one.

    Attributes:
        verdict: equal, ptx differs, host differs, only in base, only in head, or does not compile.
        detail: where, or why; empty when equal.
        diff: lines of a unified diff, when asked for.
    """

    arch: str
    label: str
    verdict: str
    detail: str = ""
    diff: tuple[str, ...] = ()


def compare(arch: str, label: str, base: dict, head: dict, *, ptx_only: bool) -> Verdict:
    """Compare what two trees made of a configuration.

    Args:
        base, head: {"ptx": text, "host": text} or {"error": reason}.
        ptx_only: leave the host function out.
    """
    for name, code in (("base", base), ("head", head)):
        if "error" in code:
            return Verdict(arch, label, "does not compile", f"{name}: {code['error']}")
    canonical = {"ptx": canonical_ptx} if ptx_only else _CANONICAL
    for part, make in canonical.items():
        before, after = make(base[part]), make(head[part])
        if before != after:
            number, old, new = first_difference(before, after)
            detail = f"line {number}\n  - {old[:LINE_LENGTH]}\n  + {new[:LINE_LENGTH]}"
            if part == "ptx" and is_renumbered(before, after):
                detail = "in nothing but the numbers of registers and labels, from " + detail
            diff = tuple(unified_diff(before, after, DIFF_LINES))
            return Verdict(arch, label, f"{part} differs", detail, diff)
    return Verdict(arch, label, "equal")


_CANONICAL = {"ptx": canonical_ptx, "host": canonical_host}


def main(description: str, argv: list[str] | None = None) -> int:
    """Compare, print and return the exit status."""
    arguments = _parse(description, argv)
    try:
        return _run(arguments)
    except UsageError as error:
        print(f"same_code: {error}", file=sys.stderr)
        return 2


def _parse(description: str, argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="same_code",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", metavar="BASE", help="a commit")
    parser.add_argument("--head", default=WORKTREE, help=f"a commit; default {WORKTREE}")
    parser.add_argument("--arch", choices=code_probe.ARCHITECTURES, help="default: all")
    parser.add_argument("--only", metavar="REGEX", help='of "arch, label", found anywhere in it')
    parser.add_argument("--jobs", type=int, default=2, help="processes; default 2")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there")
    parser.add_argument("--diff", action="store_true", help=f"show {DIFF_LINES} lines of each diff")
    parser.add_argument("--allow-new", action="store_true", help="what only the head has is fine")
    parser.add_argument("--ptx-only", action="store_true", help="leave host functions out")
    # An error of argparse is two lines: usage and reason.
    parser.error = lambda message: _exit(f"same_code: {message}")
    return parser.parse_args(argv)


def _exit(message: str) -> None:
    print(message, file=sys.stderr)
    raise SystemExit(2)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.jobs < 1:
        raise UsageError(f"--jobs: got {arguments.jobs}, needs at least 1")
    try:
        only = re.compile(arguments.only or "")
    except re.error as error:
        raise UsageError(f"--only: {arguments.only!r} is no regular expression: {error}") from None
    with _tree(arguments.base) as base, _tree(arguments.head) as head:
        sides = [_configurations(tree) for tree in (base, head)]
        names = list(dict.fromkeys(name for side in sides for name in side))
        chosen = [name for name in names if _is_chosen(name, arguments.arch, only)]
        if not chosen:
            raise UsageError(
                "no configuration is chosen; there are " + "; ".join(map(_name, names))
            )
        cache = CodeCache()
        print(f"{base.name} -> {head.name}: {len(chosen)} configurations", flush=True)

        def examine(name: tuple[str, str]) -> Verdict:
            for here, there, side in ((0, 1, "base"), (1, 0, "head")):
                if name in sides[here] and name not in sides[there]:
                    return Verdict(*name, f"only in {side}")
            codes = (
                _compile(tree, *name, side[name], cache) for tree, side in zip((base, head), sides)
            )
            return compare(*name, *codes, ptx_only=arguments.ptx_only)

        with ThreadPoolExecutor(arguments.jobs) as pool:
            verdicts = [_shown(v, arguments.diff) for v in pool.map(examine, chosen)]
    return _conclude(verdicts, cache, arguments)


def _conclude(verdicts: list[Verdict], cache: CodeCache, arguments: argparse.Namespace) -> int:
    fine = {"equal", "only in head"} if arguments.allow_new else {"equal"}
    bad = [v for v in verdicts if v.verdict not in fine]
    print(
        f"{sum(v.verdict == 'equal' for v in verdicts)} equal, {len(bad)} not "
        f"({cache.hits} compiled codes from {cache.root}, {cache.misses} compiled now)"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))
    return 1 if bad else 0


def _is_chosen(name: tuple[str, str], arch: str | None, only: re.Pattern) -> bool:
    return (arch is None or name[0] == arch) and only.search(_name(name)) is not None


def _name(name: tuple[str, str]) -> str:
    return ", ".join(name)


def _shown(verdict: Verdict, with_diff: bool) -> Verdict:
    """The verdict, printed as soon as it is known unless there is nothing to say."""
    if verdict.verdict != "equal":
        print(f"{verdict.arch}, {verdict.label}: {verdict.verdict} {verdict.detail}".rstrip())
        if with_diff:
            print("\n".join(f"    {line}" for line in verdict.diff))
        sys.stdout.flush()
    return verdict


# ---- trees ----


@contextlib.contextmanager
def _tree(revision: str) -> Iterator[Tree]:
    """A copy of the sources, so that edits made meanwhile do not mix with what is compiled."""
    root = _git("rev-parse", "--show-toplevel").decode().strip()
    with tempfile.TemporaryDirectory(prefix="same-code-") as folder:
        if revision == WORKTREE:
            source, ignored = Path(root, "dsv4"), shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, Path(folder, "dsv4"), ignore=ignored)
            yield Tree(WORKTREE, Path(folder))
            return
        name = _git(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
        )
        commit = name.decode().strip()
        archive = _git("-C", root, "archive", commit, "dsv4")
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            packed.extractall(folder, filter="data")
        yield Tree(commit[:10], Path(folder))


def _git(*command: str) -> bytes:
    done = subprocess.run(["git", *command], capture_output=True)
    if done.returncode:
        reason = done.stderr.decode().strip().splitlines()
        what = reason[0] if reason else f"no such commit: {command[-1].removesuffix('^{commit}')}"
        raise UsageError(what)
    return done.stdout


# ---- compilations ----


def _configurations(tree: Tree) -> dict[tuple[str, str], str]:
    """Identities by architecture and label."""
    answer = _probe(tree, code_probe.ARCHITECTURES[0], "list")
    if "error" in answer:
        raise UsageError(f"{tree.name}: {answer['error']}")
    return {(arch, label): identity for arch, label, identity in answer["configurations"]}


def _compile(tree: Tree, arch: str, label: str, identity: str, cache: CodeCache) -> dict:
    code = cache.get(tree, arch, label, identity)
    if code is None:
        code = _probe(tree, arch, "compile", arch, label)
        if "error" not in code:
            cache.put(tree, arch, label, identity, code)
    return code


def _probe(tree: Tree, arch: str, *command: str) -> dict:
    """Run the probe inside a tree; settings of the compiler stay outside."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")}
    environment |= {"CUTE_DSL_ARCH": arch, "PYTHONPATH": str(tree.folder), "NO_COLOR": "1"}
    child = subprocess.run(
        [sys.executable, "-c", _PROBE, *command],
        cwd=tree.folder,
        env={"OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    if child.returncode:
        words = (child.stderr.strip() or "no message").splitlines()[-1]
        return {"error": f"the compiler ended with status {child.returncode}: {words}"}
    return json.loads(child.stdout)
