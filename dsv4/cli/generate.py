"""`dsv4 generate`: continue a prompt with a checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from dsv4.cli.arguments import input_path

if TYPE_CHECKING:
    from dsv4.loader.tokenizer import Tokenizer


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare `dsv4 generate`."""
    parser = subparsers.add_parser(
        "generate", help="continue a prompt with a checkpoint", description=__doc__
    )
    parser.add_argument(
        "--checkpoint",
        type=input_path,
        required=True,
        metavar="FOLDER",
        help="checkpoint folder",
    )
    parser.add_argument("--prompt", required=True, help="text to continue; - reads standard input")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 (default) takes the best token"
    )
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus mass, in (0, 1]")
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="likeliest tokens, 0: all"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="least share of the best token's probability"
    )
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="above 1: against repetitions"
    )
    parser.add_argument("--seed", type=int, default=None, help="makes sampling repeatable")
    parser.add_argument(
        "--draft-tokens", type=int, default=0, metavar="K", help="speculate K tokens with MTP"
    )
    parser.add_argument("--device", default=None, help="torch device, default cuda if there is one")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--kv-format", default=None, help="of cached keys: bf16, fp32 or fp8; default as trained"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load, prefill, generate; the text streams to stdout, the statistics go to stderr."""
    import torch

    import dsv4
    from dsv4.loader.tokenizer import load_tokenizer

    prompt = _read_standard_input() if args.prompt == "-" else as_utf8(args.prompt)
    device = args.device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(args.checkpoint)
    token_ids = tokenizer.encode(prompt)
    if not token_ids:
        raise ValueError("prompt: it encodes to no tokens; give some text")
    model = dsv4.load(
        args.checkpoint,
        device=device,
        dtype=getattr(torch, args.dtype),
        progress=sys.stderr.isatty(),
        kv_format=args.kv_format,
    )
    printer = TextPrinter(tokenizer)
    result = model.generate(
        [token_ids],
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        num_draft_tokens=args.draft_tokens,
        on_tokens=printer.feed,
    )
    printer.finish()
    print(result.stats, file=sys.stderr)
    return 0


def _read_standard_input() -> str:
    if sys.stdin is None:
        raise ValueError("prompt: standard input is closed")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("prompt: standard input is not valid UTF-8") from None


def as_utf8(argument: str) -> str:
    """Return a command-line argument as the UTF-8 that it is, whatever the locale took it for."""
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        raise ValueError("prompt is not valid UTF-8") from None


class TextPrinter:
    """Printer of one request's tokens as they come; unfinished characters are held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = tokenizer.stream()

    def feed(self, request: int, token_ids: list[int]) -> None:
        """Take new tokens of the request and print what has become whole text."""
        sys.stdout.write(self._stream.feed(token_ids))
        sys.stdout.flush()

    def finish(self) -> None:
        """Print what was held back, and end the line."""
        sys.stdout.write(self._stream.finish() + "\n")
        sys.stdout.flush()
