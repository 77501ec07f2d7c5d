"""`dsv4 sim lowp`: quantised attention and its quantisers, simulated and compared with torch."""

from __future__ import annotations

import argparse
from functools import partial

from dsv4.cli.sim_check import CheckedLaunches, Size, add_command

ARCH = "sm_90a"
SIZES = (
    Size("queries", 200, "rows of queries"),
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
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dsv4.kernels.lowp import quantize_kv
    from dsv4.kernels.lowp.sm90 import attention
    from dsv4.ops.quantized_attention.op import QUANTIZED_ATTENTION
    from dsv4.ops.quantized_attention.quantize_kv import QUANTIZE_KV
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.kernel_call import OpKernels
    from dsv4.testing.lowp import Case
    from dsv4.testing.lowp_attention import Inputs, assert_attention
    from dsv4.testing.lowp_codes import KvInputs, assert_codes

    launches = CheckedLaunches(args, ARCH)
    builds = {QUANTIZE_KV: quantize_kv.build, QUANTIZED_ATTENTION: attention.build}
    smooth = {"pv_accum_dtype": "fp32", "smooth_v": True}
    formats = (
        {},
        {"qk": "fp8", "qk_quant_gran": "per_row"},
        {"qk": "fp8", "qk_quant_gran": "per_64"},
        {"pv": "fp16", "pv_accum_dtype": "fp16+fp32"},
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
    with launches.checks():
        for op, inputs in cases:
            kernels = OpKernels(op, launches.target)
            compiled = kernels.compile(inputs.config, builds[op])
            for schedule in SCHEDULES:
                outcome = launches.run(compiled, partial(kernels.call, inputs), schedule)
                if op is QUANTIZE_KV:
                    assert_codes(inputs, outcome)
                else:
                    assert_attention(inputs, outcome, tiles=inputs.summed_tiles)
                way = f"{inputs.config.qk}, {inputs.config.pv_accum_dtype}"
                print(f"{ARCH}, {op.name}, {way}, {schedule}: as torch")
    return launches.finish()
