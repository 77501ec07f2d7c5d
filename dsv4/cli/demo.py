"""`dsv4 demo`: a small trained DeepSeek-V4 generates through the attention op, and is checked."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4.cli.arguments import input_path

if TYPE_CHECKING:
    from dsv4.model.model import DeepseekV4

MARKS = {True: "[green]ok     [/]", False: "[red]FAILED [/]", None: "[yellow]not run[/]"}


@dataclass(frozen=True)
class Check:
    """Outcome of one check of the demo; `passed` is None when this machine cannot run it."""

    name: str
    passed: bool | None
    detail: str


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare `dsv4 demo`."""
    parser = subparsers.add_parser(
        "demo", help="generate with the shipped checkpoint and check it", description=__doc__
    )
    parser.add_argument(
        "--checkpoint", type=input_path, default=shipped_checkpoint(), metavar="FOLDER"
    )
    parser.add_argument("--prompt", default=None, help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.set_defaults(run=run)


def shipped_checkpoint() -> Path:
    """The trained checkpoint: inside an installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "checkpoints" / "tiny"
    return installed if installed.is_dir() else package.parent / "checkpoints" / "tiny"


def run(args: argparse.Namespace) -> int:
    """Show the model, generate, run every check; status 1 when one fails."""
    import torch
    from rich.console import Console
    from rich.markup import escape

    import dsv4
    from dsv4.cli import demo_checks
    from dsv4.cli.generate import TextPrinter, as_utf8
    from dsv4.loader.tokenizer import load_tokenizer

    console = Console(highlight=False)
    folder = args.checkpoint
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"no checkpoint in {folder}: the demo needs the one that ships with dsv4, "
            "or --checkpoint FOLDER"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.perf_counter()
    tokenizer = load_tokenizer(folder)
    prompt = args.prompt
    prompt = demo_checks.default_prompt(folder) if prompt is None else as_utf8(prompt)
    token_ids = tokenizer.encode(prompt)
    if not token_ids:
        raise ValueError("prompt: it encodes to no tokens; give some text")
    model = dsv4.load(folder, device=device, dtype=torch.bfloat16, progress=console.is_terminal)
    console.print(describe(model, folder, device, time.perf_counter() - started), markup=False)

    console.rule("[bold]prompt[/] | continuation")
    console.print(prompt, style="dim", end="", markup=False, soft_wrap=True)
    printer = TextPrinter(tokenizer)
    result = model.generate(
        [token_ids],
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        on_tokens=printer.feed,
    )
    printer.finish()
    console.print(f"[dim]{result.stats}[/]")

    console.rule("checks")
    failed = 0
    for check in demo_checks.run_all(model, tokenizer, folder, token_ids):
        failed += check.passed is False
        mark = MARKS[check.passed]
        console.print(f"{mark} {check.name}: {escape(check.detail)}", soft_wrap=True)
    return 1 if failed else 0


def describe(model: DeepseekV4, folder: Path, device: str, seconds: float) -> str:
    """One paragraph: what was loaded, in which formats, where it runs."""
    from dsv4.config.layer_schedule import layer_schedule

    config = model.config
    kinds = [spec.kind.name for spec in layer_schedule(config)]
    main, mtp = kinds[: config.num_hidden_layers], kinds[config.num_hidden_layers :]
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    formats = sorted({str(t.dtype).removeprefix("torch.") for t in model.state_dict().values()})
    return (
        f"DeepSeek-V4 from {folder} ({size / 2**20:.1f} MiB) in {seconds:.1f} s on {device}\n"
        f"layers: {' '.join(main)} + {len(mtp)} MTP; "
        f"{config.num_attention_heads} heads of {config.head_dim}, "
        f"{config.n_routed_experts} experts, top {config.num_experts_per_tok}\n"
        f"weights: {', '.join(formats)}"
    )
