"""`dsv4 doctor`: environment, backends found, what is missing and how to get it."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from dsv4.cli import doctor_memory
from dsv4.quoting import printable

OK, MISSING, BROKEN, INFO = "ok", "missing", "broken", "info"
ENGINES = ("vllm", "sglang", "flash_mla", "flashinfer", "transformers")


@dataclass(frozen=True)
class Finding:
    """One line of the report. `required` findings that are not ok make the exit status 1."""

    name: str
    status: str
    detail: str
    remedy: str = ""
    required: bool = False


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare `dsv4 doctor`."""
    parser = subparsers.add_parser(
        "doctor", help="report environment, backends and what is missing", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="machine-readable report on stdout")
    doctor_memory.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print every finding; status 1 when something required is not ok."""
    planned = [Finding(name, INFO, text) for name, text in doctor_memory.memory_lines(args)]
    findings = examine() + planned
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print_table(findings)
    failed = any(f.required and f.status in (MISSING, BROKEN) for f in findings)
    return 1 if failed else 0


def examine() -> list[Finding]:
    """Run every probe; one that raises becomes a `broken` finding, so the report always ends."""
    probes: tuple[Callable[[], list[Finding]], ...] = (
        _python,
        _torch,
        _gpus,
        _kernel_compiler,
        _simulator,
        _compile_cache,
        _knobs,
        _libraries,
        _engines,
    )
    findings: list[Finding] = []
    for probe in probes:
        try:
            findings.extend(probe())
        except Exception as error:
            name = probe.__name__.strip("_").replace("_", " ")
            findings.append(Finding(name, BROKEN, f"{type(error).__name__}: {error}"))
    return findings


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> list[Finding]:
    good = sys.version_info >= (3, 11)
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return [
        Finding(
            "python", OK if good else BROKEN, detail, "" if good else "use 3.11 or newer", True
        ),
        Finding("dsv4", OK, _version("dsv4") or "source tree, not installed"),
    ]


def _torch() -> list[Finding]:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    recent = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 11)
    remedy = "" if recent else "pip install 'torch>=2.11'"
    status = OK if recent else BROKEN
    return [
        Finding("torch", status, f"{torch.__version__} ({build})", remedy, required=True),
        Finding("backend cpu", OK, f"always there; {torch.get_num_threads()} threads"),
    ]


def _gpus() -> list[Finding]:
    import torch

    from dsv4.arch import of_capability

    if not torch.cuda.is_available():
        remedy = (
            "install a CUDA build of torch"
            if shutil.which("nvidia-smi") and not torch.version.cuda
            else "sm_90a and sm_100a kernels need an H100, H200, B200 or GB200"
        )
        return [Finding("backend cuda", MISSING, "torch sees no CUDA GPU", remedy)]
    findings = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        memory = properties.total_memory >> 30
        detail = f"{properties.name}, {memory} GiB, cc {capability[0]}.{capability[1]}"
        backend = of_capability(capability)
        findings.append(
            Finding(
                f"gpu {index}",
                OK if backend else INFO,
                f"{detail}: " + (f"backend {backend.name}" if backend else "torch path, no kernel"),
            )
        )
    return findings


def _kernel_compiler() -> list[Finding]:
    if sys.platform != "linux":
        return [Finding("kernel compiler", INFO, "nvidia-cutlass-dsl exists for Linux only")]
    names = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python")
    findings = []
    for name in names:
        version = _version(name)
        findings.append(
            Finding(
                name,
                OK if version else MISSING,
                version or "not installed",
                "" if version else f"pip install {name}",
            )
        )
    dsl = _version("nvidia-cutlass-dsl")
    if dsl and not dsl.startswith("4.8."):
        findings.append(
            Finding("dsl version", BROKEN, f"{dsl}; 4.8.x is supported", "pip install 'dsv4[cu13]'")
        )
    flavours = [cu for cu in ("cu12", "cu13") if _version(f"nvidia-cutlass-dsl-libs-{cu}")]
    findings.append(Finding("dsl libraries", INFO, ", ".join(flavours) or "none"))
    arch = os.environ.get("CUTE_DSL_ARCH")
    if arch == "":
        remedy = "unset CUTE_DSL_ARCH: cutlass fails to import when it is empty"
        findings.append(Finding("CUTE_DSL_ARCH", BROKEN, "set, but empty", remedy))
    else:
        findings.append(Finding("CUTE_DSL_ARCH", INFO, arch or "not set: the GPU present decides"))
    return findings


def _simulator() -> list[Finding]:
    from dsv4.simulator.errors import SimulatorError
    from dsv4.simulator.frontend.stub_library import c_compiler

    name = "backend sim"
    if importlib.util.find_spec("cutlass") is None:
        return [Finding(name, MISSING, "needs cutlass-dsl", "pip install nvidia-cutlass-dsl")]
    try:
        return [Finding(name, OK, f"C compiler {shlex.join(c_compiler())}")]
    except SimulatorError as error:
        is_chosen = bool(os.environ.get("CC"))
        remedy = "set CC to a C compiler, or unset it" if is_chosen else "apt install gcc"
        return [Finding(name, BROKEN if is_chosen else MISSING, str(error), remedy)]


def _knobs() -> list[Finding]:
    from dsv4.ops.quantized_attention.knobs import KNOBS, PREFIXES

    names = [prefix + knob.variable for knob in KNOBS for prefix in PREFIXES]
    found = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    detail = ", ".join(found) or "none set"
    return [Finding("attention knobs", INFO, detail, "docs/design/lowp.md has all" * bool(found))]


def _compile_cache() -> list[Finding]:
    from dsv4.ops.runtime.cache import cache_root

    root = Path(cache_root())
    problem = _cannot_keep(root)
    if problem:
        remedy = "set DSV4_CACHE_DIR to a folder you can write, with room for compiled kernels"
        return [Finding("compile cache", BROKEN, f"{root}: {problem}", remedy)]
    objects = list(root.rglob("*.o")) if root.exists() else []
    size = sum(path.stat().st_size for path in objects) / 2**20
    detail = f"{root}: {len(objects)} objects, {size:.1f} MiB"
    return [Finding("compile cache", OK, detail)]


def _cannot_keep(root: Path) -> str:
    """Why files cannot be kept under a folder that may not exist yet; empty if they can.

    Tried, not asked: root may write wherever permissions are read, and yet not into /proc.
    """
    existing = next(parent for parent in (root, *root.parents) if parent.exists())
    if not existing.is_dir():
        return f"{existing} is not a folder"
    try:
        with tempfile.TemporaryDirectory(dir=existing) as folder:
            (Path(folder) / "probe").write_bytes(bytes(4096))
    except OSError as error:
        return str(error)
    return ""


def _libraries() -> list[Finding]:
    findings = []
    for name in ("safetensors", "tokenizers", "rich", "filelock", "platformdirs"):
        version = _version(name)
        remedy = "" if version else f"pip install {name}"
        status = OK if version else MISSING
        findings.append(Finding(name, status, version or "not installed", remedy, required=True))
    return findings


def _engines() -> list[Finding]:
    present = [f"{name} {_version(name) or ''}".strip() for name in ENGINES if _found(name)]
    return [Finding("engines and peers", INFO, ", ".join(present) or "none installed")]


def _found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _print_table(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {OK: "green", MISSING: "yellow", BROKEN: "red", INFO: "cyan"}
    table = Table(box=None, pad_edge=False)
    for heading in ("what", "status", "found", "how to get it"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        status = f"[{colours[finding.status]}]{finding.status}[/]"
        # Not as markup: paths, and what probes raised, are foreign.
        table.add_row(finding.name, status, Text(printable(finding.detail)), finding.remedy)
    Console().print(table)
