"""`dsv4 sim lowp`: quantised attention, its quantisers, and layouts turned, compared with torch."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from dsv4.cli.sim_check import CheckedLaunches, Size, add_command
from dsv4.quoting import quoted

SIZES = (
    # Work tiles of which a warpgroup has no query.
    Size("queries", 300, "rows of queries"),
    # More tiles of 128 keys than the rings have stages.
    Size("keys", 810, "rows of keys"),
    Size("dim", 64, "channels of a head, up to 128"),
)
# Formats whose time is modelled, by name, with what differs from the defaults.
MODELLED: dict[str, dict[str, Any]] = {
    "int8": {},
    "fp8": {"qk": "fp8", "qk_quant_gran": "per_64"},
    "fp8-rows": {"qk": "fp8", "qk_quant_gran": "per_row"},
    "fp16-values": {"qk": "fp8", "qk_quant_gran": "per_64", "pv": "fp16"},
    "nvfp4": {"qk": "nvfp4"},
    "nvfp4-smooth-q": {"qk": "nvfp4", "smooth_q": True},
}
# Two work tiles of 256 queries for each SM of a B200, heads of keys that their queries share.
MODEL_HEADS, MODEL_KEY_HEADS, MODEL_QUERIES, MODEL_KEYS = 148, 4, 512, 8192


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = add_command(
        kernels,
        "lowp",
        "quantised attention, causal, and the quantisers of keys and values",
        "Compile the kernels, simulate them in every schedule, and compare codes with torch's bit "
        "for bit, outputs within what rounding explains.",
        SIZES,
        run,
        has_arch=True,
    )
    parser.add_argument(
        "--model",
        choices=MODELLED,
        metavar="FORMAT",
        help="only model the time of a long call of one format, codes given, with --dim channels: "
        f"{MODEL_HEADS} heads ({MODEL_KEY_HEADS} of keys), {MODEL_QUERIES} queries, "
        f"{MODEL_KEYS:,} keys; {', '.join(MODELLED)}",
    )


def two_of_the_middle(count: int) -> tuple[int, int]:
    """CTAs to model: neighbours, which may share their keys. All have as much work."""
    return count // 2, min(count // 2 + 1, count - 1)


def model(name: str, dim: int, arch: str, seed: int) -> int:
    """Print the modelled time of a format on an architecture's machine."""
    from dsv4.kernels.lowp.config import has_kernel
    from dsv4.ops.quantized_attention.op import QUANTIZED_ATTENTION
    from dsv4.simulator.timing import MACHINES, predict
    from dsv4.testing.harness import Simulator
    from dsv4.testing.kernel_call import OpKernels
    from dsv4.testing.lowp import Case
    from dsv4.testing.lowp_attention import Inputs

    shape = (1, MODEL_HEADS, MODEL_KEY_HEADS, MODEL_QUERIES, MODEL_KEYS, dim)
    inputs = Inputs.make(Case(*shape, options=MODELLED[name]), seed)
    if not has_kernel(inputs.config, arch):
        raise ValueError(f"--model: got {quoted(name)}, {arch} has no kernel for it")
    kernels = OpKernels(QUANTIZED_ATTENTION, Simulator(arch))
    machine = MACHINES[arch]
    call = kernels.call(inputs)
    call.options["num_ctas"] = machine.multiprocessors
    compiled = kernels.compile(inputs.config)
    found = predict(compiled, *call.args, **call.options, choose=two_of_the_middle)
    flops = 4 * MODEL_HEADS * MODEL_QUERIES * MODEL_KEYS * dim
    longest = found.longest
    shares = sorted(longest.busy.items(), key=lambda item: -item[1])[:3]
    busy = ", ".join(f"{unit} {cycles / longest.cycles:.0%}" for unit, cycles in shares)
    print(
        f"{machine.name} model, {name}, {dim} channels: {flops / found.microseconds / 1e6:,.0f} "
        f"TFLOP/s, {found.microseconds:.1f} us, a prediction; {machine.assumed}; busy: {busy}"
    )
    return 0


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    if args.model is not None:
        return model(args.model, args.dim, args.arch, args.seed)
    from dsv4.ops.quantized_attention.op import QUANTIZED_ATTENTION
    from dsv4.ops.quantized_attention.quantize_kv import QUANTIZE_KV
    from dsv4.ops.quantized_attention.relayout import DSHB_TO_BHSD
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.kernel_call import OpKernels
    from dsv4.testing.lowp import Case
    from dsv4.testing.lowp_attention import Inputs, assert_attention
    from dsv4.testing.lowp_codes import KvInputs, assert_codes
    from dsv4.testing.relayout import RelayoutInputs, assert_turned

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
        *(
            (QUANTIZE_KV, KvInputs.make(
                Case(1, 2, 1, 1, args.keys, args.dim, options=options), args.seed))
            for options in ({}, smooth, {"qk": "nvfp4", "smooth_q": True})
        ),
        *(
            (QUANTIZED_ATTENTION, Inputs.make(
                Case(1, 2, 1, args.queries, args.keys, args.dim,
                     options={"causal": "bottom_right", **options}), args.seed))
            for options in formats
        ),
        (DSHB_TO_BHSD, RelayoutInputs.make((1, 2, 37, args.dim), args.seed)),
    )  # fmt: skip
    is_blackwell = args.arch == "sm_100a"
    with launches.checks():
        for op, inputs in cases:
            if not op.serves(inputs.config, args.arch):
                continue
            kernels = OpKernels(op, launches.target)
            compiled = kernels.compile(inputs.config)
            make = partial(kernels.call, inputs)
            if op is QUANTIZED_ATTENTION and is_blackwell:
                # One CTA goes from one work tile to the next.
                make = partial(make, num_ctas=1)
            for schedule in SCHEDULES:
                outcome = launches.run(compiled, make, schedule)
                way = "channels first"
                if op is DSHB_TO_BHSD:
                    assert_turned(inputs, outcome)
                elif op is QUANTIZE_KV:
                    assert_codes(inputs, outcome)
                else:
                    tiles = inputs.summed_tiles
                    assert_attention(inputs, outcome, tiles=tiles, has_fp32_sums=is_blackwell)
                if op is not DSHB_TO_BHSD:
                    way = f"{inputs.config.qk}, {inputs.config.pv_accum_dtype}"
                print(f"{args.arch}, {op.name}, {way}, {schedule}: as torch")
    return launches.finish()
