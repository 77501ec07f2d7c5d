"""`dsv4 sim lowp`: quantised attention and its quantisers, simulated and compared with torch."""

from __future__ import annotations

import argparse
from functools import partial

from dsv4.cli.sim_check import CheckedLaunches, Size, add_command

SIZES = (
    # Work tiles of which a warpgroup has no query.
    Size("queries", 300, "rows of queries"),
    # More tiles of 128 keys than the rings have stages.
    Size("keys", 810, "rows of keys"),
    Size("dim", 64, "channels of a head, up to 128"),
)


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    add_command(
        kernels,
        "lowp",
        "quantised attention, causal, and the quantisers of keys and values",
        "Compile the kernels, simulate them in every schedule, and compare codes with torch's bit "
        "for bit, outputs within what rounding explains.",
        SIZES,
        run,
        has_arch=True,
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dsv4.kernels.lowp.config import has_kernel
    from dsv4.ops.quantized_attention.op import QUANTIZED_ATTENTION
    from dsv4.ops.quantized_attention.quantize_kv import QUANTIZE_KV
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.kernel_call import OpKernels
    from dsv4.testing.lowp import Case
    from dsv4.testing.lowp_attention import Inputs, assert_attention
    from dsv4.testing.lowp_codes import KvInputs, assert_codes

    launches = CheckedLaunches(args, args.arch)
    smooth = {"pv_accum_dtype": "fp32", "smooth_v": True}
    formats = (
        {},
        {"qk": "fp8", "qk_quant_gran": "per_row"},
        {"qk": "fp8", "qk_quant_gran": "per_64"},
        {"pv": "fp16", "pv_accum_dtype": "fp16+fp32"},
        {"qk": "nvfp4"},
        {"qk": "nvfp4", "smooth_q": True},
    )
    cases = (
        (QUANTIZE_KV, KvInputs.make(Case(1, 2, 1, 1, args.keys, args.dim), args.seed)),
        (QUANTIZE_KV, KvInputs.make(Case(1, 2, 1, 1, args.keys, args.dim, options=smooth),
                                    args.seed)),
        *(
            (QUANTIZED_ATTENTION, Inputs.make(
                Case(1, 2, 1, args.queries, args.keys, args.dim,
                     options={"causal": "bottom_right", **options}), args.seed))
            for options in formats
        ),
    )  # fmt: skip
    is_blackwell = args.arch == "sm_100a"
    with launches.checks():
        for op, inputs in cases:
            if op is QUANTIZED_ATTENTION and not has_kernel(inputs.config, args.arch):
                continue
            kernels = OpKernels(op, launches.target)
            compiled = kernels.compile(inputs.config)
            make = partial(kernels.call, inputs)
            if op is QUANTIZED_ATTENTION and is_blackwell:
                # One CTA goes from one work tile to the next.
                make = partial(make, num_ctas=1)
            for schedule in SCHEDULES:
                outcome = launches.run(compiled, make, schedule)
                if op is QUANTIZE_KV:
                    assert_codes(inputs, outcome)
                else:
                    tiles = inputs.summed_tiles
                    assert_attention(inputs, outcome, tiles=tiles, has_fp32_sums=is_blackwell)
                way = f"{inputs.config.qk}, {inputs.config.pv_accum_dtype}"
                print(f"{args.arch}, {op.name}, {way}, {schedule}: as torch")
    return launches.finish()
