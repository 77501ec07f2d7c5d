"""Memory part of `dsv4 doctor`: what a checkpoint takes, and which GPUs hold it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

GIB = 1 << 30
#: Memory that one GPU offers to a process, in GiB.
GPU_MEMORY = {"H100": 79, "H200": 139, "B200": 178}


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--checkpoint`, `--context`, `--requests` and `--kv-format`."""
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="also plan the memory of this model (its config.json)",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help="tokens of each request (default: the model's)",
    )
    parser.add_argument("--requests", type=int, metavar="R", help="at the same time (default 1)")
    parser.add_argument("--kv-format", help="of cached keys: bf16 or fp8 (default: the model's)")


def memory_lines(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Name and text of each line of the plan that the options ask for.

    Raises:
        ValueError: sizes without a checkpoint, out of range, or a file that is no configuration.
        OSError: the file cannot be read.
    """
    if args.checkpoint is None:
        for name in ("context", "requests", "kv_format"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')}: needs --checkpoint")
        return
    from dsv4.config.model_config import ModelConfig
    from dsv4.engine.memory_plan import plan_memory

    config = ModelConfig.from_json(args.checkpoint)
    context = config.max_position_embeddings if args.context is None else args.context
    requests = 1 if args.requests is None else args.requests
    sizes = f"{requests} x {context:,} tokens"
    plan = plan_memory(config, context, requests, kv_format=args.kv_format)
    yield "memory: weights", _gib(plan.weights)
    yield "memory: windows", _gib(plan.windows)
    yield "memory: states", _gib(plan.states)
    yield "memory: entries", _gib(plan.entries)
    yield "memory: index keys", _gib(plan.index_keys)
    yield "memory: cache", f"{_gib(plan.cache)} of {sizes}"
    yield "memory: requests", _gib(plan.requests)
    yield "memory: working, estimated", _gib(plan.working)
    yield "memory: peak", f"{_gib(plan.total)} for {sizes}"
    one, two = (plan_memory(config, context, count, kv_format=args.kv_format) for count in (1, 2))
    for product, room in GPU_MEMORY.items():
        left = room * GIB - one.total
        if left < 0:
            text = f"no: one request needs {_gib(-left)} more than its {room} GiB"
        else:
            count = 1 + left // max(1, two.total - one.total)
            text = f"{'yes' if plan.total <= room * GIB else 'no'}: holds {count} such requests"
        yield f"fits one {product}", text


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:.2f} MiB"
