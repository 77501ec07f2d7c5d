"""`dsv4 bench attention --paged`: time attention over paged pools on this machine's GPU."""

from __future__ import annotations

import argparse

from dsv4.cli import bench_rows


def run(args: argparse.Namespace) -> int:
    """Time the operator and FlashMLA; print the table while it grows."""
    from dsv4.bench import flash_mla, paged_attention, report
    from dsv4.bench.machine import Machine
    from dsv4.bench.paged_shapes import model_shapes

    for name in ("num_splits", "plot"):
        if getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: is not offered with --paged")
    library = None if args.no_peers else flash_mla.find(args.flashmla)
    shapes = [shape for numbers in args.shape or () for shape in user_shapes(numbers)]
    machine = Machine.measure()
    print(machine)
    print(report.table_head(paged_attention.COLUMNS))
    failures = []
    with bench_rows.recorded(args.json, "paged_attention", machine) as rows:
        for result in paged_attention.measure(shapes or model_shapes(), machine, library):
            rows.append(paged_attention.as_row(result))
            print(report.table_line(paged_attention.cells(rows[-1])), flush=True)
            if result.failure:
                failures.append(f"{paged_attention.PEER} at {result.shape}: {result.failure}")
    print("\n".join(failures), end="\n" if failures else "")
    return 0


def user_shapes(numbers: tuple[int, int, int, int]) -> list:
    """Shapes of tokens, heads, compressed and window keys, in both formats."""
    from dsv4.bench.paged_shapes import CONTEXT, Shape

    tokens, heads, top_k, window = numbers
    if top_k > CONTEXT:
        raise ValueError(f"--shape: got {top_k} compressed keys, contexts have {CONTEXT}")
    return [Shape("user", tokens, heads, top_k, window, kv_format) for kv_format in ("bf16", "fp8")]
