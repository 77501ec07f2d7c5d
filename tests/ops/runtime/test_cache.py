"""The compiled-runner cache: what counts as a hit, what survives damage, who compiles when."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.ops.attention.sparse_fmha import SPARSE_FMHA
from dsv4.ops.runtime import registry
from dsv4.ops.runtime.cache import CompileCache, NotKept, cache_root
from dsv4.ops.runtime.registry import CompileKey

CONFIG = FmhaConfig(512, 64, 128, 512, sink_mode="softmax")
KEY = SPARSE_FMHA.compile_key(CONFIG, "sm_90a")


class FakeToolchain:
    """Objects are text files with the name of what was compiled."""

    arch = "sm_90a"

    def __init__(self, **versions: str) -> None:
        self.sources = versions.pop("sources", "1")
        self.versions = {"compiler": "1", "cuda": "cu12", **versions}

    def source_digest(self, module: str) -> str:
        return f"{module} {self.sources}"

    def export(self, compiled: str, path: Path) -> None:
        path.write_text(compiled)

    def load(self, path: Path) -> Callable[[], str]:
        content = path.read_text()
        if not content.startswith("object"):
            raise RuntimeError("cannot load")
        return lambda: content


class Builder:
    """Counts compilations."""

    def __init__(self) -> None:
        self.built: list[CompileKey] = []

    def __call__(self, key: CompileKey) -> str:
        self.built.append(key)
        return f"object {len(self.built)}"


@pytest.fixture
def builder() -> Builder:
    return Builder()


def cache(root: Path, **versions: str) -> CompileCache:
    """A cache as a fresh process would have it."""
    return CompileCache(root, FakeToolchain(**versions))


def test_memory_then_disk_then_compile(tmp_path: Path, builder: Builder) -> None:
    first = cache(tmp_path)
    runner = first.get(KEY, builder)
    assert runner() == "object 1"
    assert first.get(KEY, builder) is runner
    assert cache(tmp_path).get(KEY, builder)() == "object 1"
    assert builder.built == [KEY]


def test_every_part_of_the_key_counts(tmp_path: Path, builder: Builder) -> None:
    """Another configuration, compiler, toolkit or architecture is another object."""
    other = SPARSE_FMHA.compile_key(replace(CONFIG, num_query_heads=8), "sm_90a")
    paths = {
        cache(tmp_path).path(KEY),
        cache(tmp_path).path(other),
        cache(tmp_path, compiler="2").path(KEY),
        cache(tmp_path, cuda="cu13").path(KEY),
        cache(tmp_path, sources="changed").path(KEY),
        cache(tmp_path).path(SPARSE_FMHA.compile_key(CONFIG, "sm_100a")),
    }
    assert len(paths) == 6
    cache(tmp_path).get(KEY, builder)
    cache(tmp_path).get(other, builder)
    cache(tmp_path, compiler="2").get(KEY, builder)
    assert len(builder.built) == 3


def test_key_blanks_what_is_known_at_run_time() -> None:
    """A growing context or an unused window must not compile again."""
    same = [
        replace(CONFIG, top_k=1024),
        replace(CONFIG, sliding_window=64),
        replace(CONFIG, softmax_scale=512**-0.5),
    ]
    assert {SPARSE_FMHA.compile_key(config, "sm_90a") for config in same} == {KEY}
    causal = replace(CONFIG, is_causal=True)
    different = [
        causal,
        replace(causal, sliding_window=64),
        replace(CONFIG, sink_mode="swa_gate"),
        replace(CONFIG, softmax_scale=0.1),
        replace(CONFIG, head_dim=128),
    ]
    assert len({SPARSE_FMHA.compile_key(config, "sm_90a") for config in different} | {KEY}) == 6
    with pytest.raises(FrozenInstanceError):
        KEY.arch = "sm_100a"
    with pytest.raises(ValueError, match="arch: got 'sm_80', needs one of sm_90a"):
        SPARSE_FMHA.compile_key(CONFIG, "sm_80")


@pytest.mark.parametrize(
    ("arch", "heads", "kernels"),
    [
        ("sm_90a", 64, 2),
        ("sm_90a", 128, 2),
        ("sm_90a", 16, 1),
        ("sm_90a", 40, 1),
        ("sm_100a", 64, 1),
    ],
)
def test_fixed_splits_have_one_kernel(arch, heads, kernels) -> None:
    """Where the size of a launch picks one of two, a token's bits would depend on the batch."""
    config = replace(CONFIG, num_query_heads=heads)
    chosen, *fixed = (
        SPARSE_FMHA.compile_key(replace(config, num_splits=splits), arch)
        for splits in (None, 1, 4, 9)
    )
    assert len(set(fixed)) == 1
    assert len({chosen, *fixed}) == kernels
    assert chosen.config.num_splits is None


def damage_truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:3])


def damage_altered(path: Path) -> None:
    path.write_text("object of somebody else")


def damage_unreadable_record(path: Path) -> None:
    path.with_suffix(".json").write_text("{")


def damage_stale_record(path: Path) -> None:
    record = json.loads(path.with_suffix(".json").read_text())
    record["versions"]["compiler"] = "0"
    path.with_suffix(".json").write_text(json.dumps(record))


def damage_foreign_record(path: Path) -> None:
    record = json.loads(path.with_suffix(".json").read_text())
    record["key"]["arch"] = "sm_100a"
    path.with_suffix(".json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    "damage",
    [
        damage_truncated,
        damage_altered,
        damage_unreadable_record,
        damage_stale_record,
        damage_foreign_record,
    ],
)
def test_damage_is_a_miss_with_a_warning(
    tmp_path: Path, builder: Builder, damage: Callable[[Path], None]
) -> None:
    cache(tmp_path).get(KEY, builder)
    damage(cache(tmp_path).path(KEY))
    with pytest.warns(RuntimeWarning, match=r"compiled kernel .*\.o is unusable .*compiling"):
        assert cache(tmp_path).get(KEY, builder)() == "object 2"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache(tmp_path).get(KEY, builder)() == "object 2"


def test_object_that_does_not_load_is_a_miss(tmp_path: Path, builder: Builder) -> None:
    """A right checksum does not make an object loadable (another libc, say)."""
    bad = cache(tmp_path)
    with pytest.raises(RuntimeError, match="cannot load"):
        bad.get(KEY, lambda key: "not an object")
    with pytest.warns(RuntimeWarning, match="cannot load"):
        assert cache(tmp_path).get(KEY, builder)() == "object 1"


@pytest.mark.parametrize("missing", [".o", ".json"])
def test_half_an_entry_is_a_miss(tmp_path: Path, builder: Builder, missing: str) -> None:
    """What a crash between the two renames leaves."""
    cache(tmp_path).get(KEY, builder)
    cache(tmp_path).path(KEY).with_suffix(missing).unlink()
    assert cache(tmp_path).get(KEY, builder)() == "object 2"


def test_record_is_readable(tmp_path: Path, builder: Builder) -> None:
    cache(tmp_path).get(KEY, builder)
    record = json.loads(cache(tmp_path).path(KEY).with_suffix(".json").read_text())
    assert record["key"]["kernel"] == "dsv4.kernels.attention.sm90.fmha"
    assert record["key"]["arch"] == "sm_90a"
    assert record["key"]["config"]["num_query_heads"] == 64
    assert record["versions"]["compiler"] == "1"
    assert len(record["sha256"]) == 64


def test_failed_compilation_leaves_nothing(tmp_path: Path, builder: Builder) -> None:
    def failing(key: CompileKey) -> str:
        raise ValueError("no such instruction")

    with pytest.raises(ValueError, match="no such instruction"):
        cache(tmp_path).get(KEY, failing)
    left = [path.suffix for path in tmp_path.rglob("*") if path.is_file()]
    assert set(left) <= {".lock"}
    assert cache(tmp_path).get(KEY, builder)() == "object 1"


def test_foreign_architecture_is_refused(tmp_path: Path, builder: Builder) -> None:
    """Code for another architecture compiles without complaint and fails only when it is called."""
    with pytest.raises(RuntimeError, match=r"for sm_90a, .*dsv4 compile --arch sm_100a"):
        cache(tmp_path).get(SPARSE_FMHA.compile_key(CONFIG, "sm_100a"), builder)
    assert builder.built == []


def test_folder_that_cannot_be_written(tmp_path: Path, builder: Builder) -> None:
    """Compiles with a warning instead of failing."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.warns(NotKept, match=r"cannot be kept.*DSV4_CACHE_DIR"):
        assert cache(blocked).get(KEY, builder)() == "object 1"


def test_full_disk(tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles once, warns, and goes on by way of a temporary folder, as in a read-only one."""
    full = cache(tmp_path)
    export = FakeToolchain.export

    def export_if_there_is_room(self, compiled: str, path: Path) -> None:
        if tmp_path in path.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        export(self, compiled, path)

    monkeypatch.setattr(FakeToolchain, "export", export_if_there_is_room)
    with pytest.warns(NotKept, match=r"cannot be kept in .*No space left.*DSV4_CACHE_DIR"):
        assert full.get(KEY, builder)() == "object 1"
    assert builder.built == [KEY]
    assert not list(tmp_path.rglob("*.o"))


def test_threads_compile_once(tmp_path: Path) -> None:
    builder = Builder()
    start = threading.Barrier(4)
    results = []

    def work() -> None:
        def slow(key: CompileKey) -> str:
            time.sleep(0.1)
            return builder(key)

        own = cache(tmp_path)
        start.wait()
        results.append(own.get(KEY, slow)())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["object 1"] * 4


def _compile_in_process(root: Path, start, results) -> None:
    def slow(key: CompileKey) -> str:
        time.sleep(0.2)
        return f"object of {os.getpid()}"

    start.wait()
    results.put(cache(root).get(KEY, slow)())


def test_processes_compile_once(tmp_path: Path) -> None:
    """Ranks of one engine start together: one compiles, the others wait and load."""
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(3), context.Queue()
    workers = [
        context.Process(target=_compile_in_process, args=(tmp_path, start, results))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    objects = {results.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(objects) == 1


def test_miss_hook_runs_only_when_memory_misses(tmp_path: Path, builder: Builder) -> None:
    """The hook refuses cold runners during a CUDA graph capture; even a load is too much then."""

    def refuse() -> None:
        raise RuntimeError("cold")

    warm = cache(tmp_path)
    warm.get(KEY, builder)
    warm.get(KEY, builder, before_miss=refuse)
    with pytest.raises(RuntimeError, match="cold"):
        cache(tmp_path).get(KEY, builder, before_miss=refuse)


def test_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("DSV4_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    if sys.platform == "linux":
        assert cache_root() == tmp_path / "user" / "dsv4"
    assert cache_root().name == "dsv4"


def test_configurations_of_the_models() -> None:
    configurations = SPARSE_FMHA.aot().values()
    assert {config.num_query_heads for config in configurations} == {8, 16, 32, 64, 128}
    assert {config.sink_mode for config in configurations} == {"softmax"}
    assert len({SPARSE_FMHA.compile_key(config, "sm_90a") for config in configurations}) == len(
        configurations
    )


def test_build_goes_to_the_kernel_module(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Module:
        @staticmethod
        def build(config: FmhaConfig, options: str) -> str:
            calls.append((config, options))
            return "compiled"

    monkeypatch.setattr(registry.importlib, "import_module", lambda name: Module)
    assert registry.build(KEY, "some option") == "compiled"
    assert calls == [(KEY.config, "some option")]


CHILD = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    import torch
    from dsv4.kernels.attention.config import FmhaConfig
    from dsv4.ops.runtime.cache import CompileCache
    from dsv4.ops.attention.sparse_fmha import SPARSE_FMHA

    arch, root, mode = sys.argv[1:]

    def compile_it(key):
        from tests.ops.runtime import trivial_kernel
        return trivial_kernel.build()

    def forbid(key):
        raise AssertionError("compiled again")

    key = SPARSE_FMHA.compile_key(FmhaConfig(512, 64, 128, 512), arch)
    double = CompileCache(Path(root)).get(key, compile_it if mode == "compile" else forbid)
    # The object checks its arguments; with a GPU it would go on and launch.
    try:
        double(torch.zeros(3), torch.zeros(3))
    except Exception as error:
        print(type(double).__module__, error)
    """
)


@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=pytest.mark.slow), "sm_100a"])
def test_real_objects(arch: str, tmp_path: Path) -> None:
    """Compile for a GPU that is not there, then load in a process that has no tools at all."""
    pytest.importorskip("cutlass", reason="needs the kernel compiler")
    root = Path(__file__).parents[3]

    def child(mode: str, **settings: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(root), "CUTE_DSL_ARCH": arch, **settings}
        done = subprocess.run(
            [sys.executable, "-c", CHILD, arch, str(tmp_path), mode],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = child("compile")
    assert "expected device_type=cuda" in said
    (stored,) = tmp_path.rglob("*.o")
    assert f"{arch}-cu" in str(stored)
    # Loading needs neither the target architecture nor a compiler on the path.
    assert child("load", PATH="", CUTE_DSL_ARCH="sm_120a") == said
