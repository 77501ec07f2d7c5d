"""`dsv4 bench`: time the kernels on this machine's GPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4.cli import (
    bench_compress,
    bench_engine,
    bench_fp8_linear,
    bench_index_topk,
    bench_latent_rows,
    bench_linear,
    bench_lowp,
    bench_merged_linear,
    bench_mhc_seam,
    bench_moe,
    bench_paged,
    bench_prefill,
    bench_rms_norm_fp8,
    bench_rows,
    bench_sampler,
    bench_step,
)
from dsv4.cli.arguments import input_path
from dsv4.cli.output_file import output_file
from dsv4.quoting import quoted

if TYPE_CHECKING:
    from dsv4.bench.peers import Peer

# A user shape: tokens, heads, compressed keys, window keys.
SHAPE_FORMAT = "T,HEADS,TOP_K,WINDOW"


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("bench", help="time the kernels on this GPU")
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    attention = benchmarks.add_parser(
        "attention",
        help="sparse_fmha_with_swa: microseconds, rates, the GPU's floor, and peers",
        description="CUDA-graph replays over rotating inputs larger than L2, medians. The floor is "
        "the larger of bytes over memory bandwidth and FLOPs over matmul rate, both measured now.",
    )
    attention.add_argument(
        "--shape",
        action="append",
        type=parse_shape,
        metavar=SHAPE_FORMAT,
        help="measure this shape instead of the model table (repeatable)",
    )
    attention.add_argument(
        "--paged",
        action="store_true",
        help="sparse_fmha_paged instead: keys by index from pages of bf16 rows and of FP8 entries, "
        "beside FlashMLA's kernels",
    )
    attention.add_argument("--num-splits", type=int, help="fixed KV splits instead of the choice")
    attention.add_argument("--no-peers", action="store_true", help="time our kernel alone")
    attention.add_argument(
        "--flashmla",
        type=input_path,
        metavar="FILE",
        help="FlashMLA's extension, the file _flashmla_C.abi3.so of a vLLM wheel (default: the "
        "packages flash_mla and vllm, where they are installed)",
    )
    attention.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the results here"
    )
    attention.add_argument(
        "--plot", type=output_file, metavar="FILE", help="also draw a roofline (PNG)"
    )
    attention.set_defaults(run=run_attention)
    bench_rms_norm_fp8.add_parser(benchmarks)
    bench_mhc_seam.add_parser(benchmarks)
    bench_index_topk.add_parser(benchmarks)
    bench_lowp.add_parser(benchmarks)
    bench_compress.add_parser(benchmarks)
    bench_latent_rows.add_parser(benchmarks)
    bench_linear.add_parser(benchmarks)
    bench_fp8_linear.add_parser(benchmarks)
    bench_merged_linear.add_parser(benchmarks)
    bench_moe.add_parser(benchmarks)
    bench_sampler.add_parser(benchmarks)
    bench_step.add_parser(benchmarks)
    bench_prefill.add_parser(benchmarks)
    bench_engine.add_parser(benchmarks)


def check_gpu() -> None:
    """Raise RuntimeError unless this machine has a GPU with a kernel of ours."""
    import torch

    from dsv4.arch import of_capability

    if not torch.cuda.is_available():
        raise RuntimeError("bench needs a CUDA GPU, none is available")
    if of_capability(torch.cuda.get_device_capability()) is None:
        raise RuntimeError(f"bench: there is no kernel for {torch.cuda.get_device_name()}")


def run_attention(args: argparse.Namespace) -> int:
    """Time attention and its peers; print the table while it grows."""
    check_gpu()
    if args.paged:
        return bench_paged.run(args)
    from dsv4.bench import attention, attention_report, report
    from dsv4.bench.machine import Machine
    from dsv4.bench.shapes import model_cases
    from dsv4.testing.attention import Case

    cases = [Case.decode(*numbers, name="user") for numbers in args.shape or ()] or model_cases()
    peers = [] if args.no_peers else _peers(args.flashmla)
    machine = Machine.measure()
    print(machine)
    names = [peer.name for peer in peers]
    print(report.table_head(attention_report.columns(names)))
    results: list[attention.Result] = []
    extra: dict[str, Any] = {}
    with bench_rows.recorded(args.json, "attention", machine, extra) as rows:
        for result in attention.measure(cases, machine, num_splits=args.num_splits, peers=peers):
            results.append(result)
            rows.append(attention_report.as_row(result))
            print(report.table_line(attention_report.cells(rows[-1], names)), flush=True)
        for result in results:
            for name, reason in result.failures.items():
                print(f"{name} at {attention.described(result.case)}: {reason.splitlines()[0]}")
        host = attention.host_cost()
        print(
            f"host: {host.operator:.1f} us per call of the operator, {host.launch:.1f} us of them "
            f"the launch itself, {host.beyond:.1f} us beyond it"
        )
        extra["host_microseconds"] = attention_report.host_row(host)
    if args.plot is not None:
        report.plot(machine, attention_report.roofline(results), args.plot)
    return 0


def _peers(flashmla: Path | None) -> list[Peer]:
    from dsv4.bench import flash_mla
    from dsv4.bench.peers import torch_peers

    library = flash_mla.find(flashmla)
    return torch_peers() + (flash_mla.flash_mla_peers(library) if library else [])


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """Tokens, heads, compressed and window keys of a `SHAPE_FORMAT`, for argparse."""
    try:
        tokens, heads, top_k, window = (int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}, expected {SHAPE_FORMAT}") from None
    if min(tokens, heads) < 1 or min(top_k, window) < 0 or top_k + window == 0:
        raise argparse.ArgumentTypeError(f"{quoted(text)} has nothing to attend to")
    return tokens, heads, top_k, window
