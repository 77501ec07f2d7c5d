"""`dsv4 sim moe`: a mixture-of-experts layer, simulated in every tiling and compared."""

from __future__ import annotations

import argparse
from functools import partial

from dsv4.cli.sim_check import CheckedLaunches, Size, add_command
from dsv4.kernels.moe.config import EXPERT_DTYPES

FEW_SMS = 2  # whose CTAs take all tiles
# By case, of Blackwell: CTAs there begin with a tile of the shared expert whose weights are known
# before the launch before is over, or with one whose are not, or with one of a routed expert.
BLACKWELL_SMS = (40, 8, FEW_SMS, 8, 8)
FEW_TOKENS = (5, 9)  # for which one CTA chooses experts, and sorts without counting
GATE_TOKENS = 520  # of which a CTA of the gate takes all the tiles that it may, in one tiling
SIZES = (
    Size("tokens", 37, "T of a launch whose CTAs have several tiles"),
    Size("hidden", 512, "D, a multiple of 512"),
    Size("inner", 384, "I, a multiple of 128"),
    Size("experts", 32, "E, a multiple of 32"),
    Size("top-k", 7, "experts of a token"),
    # As many pairs of token and expert as warps count in several turns, in each of their places.
    Size("many", 2240, "T of a launch that is padding but for some"),
    # Experts have any number of them: tiles of all kinds.
    Size("live", 130, "those"),
)


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = add_command(
        kernels,
        "moe",
        "mixture-of-experts layer, every tiling",
        "Compile the kernels, simulate router and experts with each tiling, compare each launch "
        "with exact sums of what it was given, and all tilings bit for bit: few tokens, more, and "
        "many that are padding, which the sort goes through in several turns.",
        SIZES,
        run,
        has_arch=True,
    )
    parser.add_argument(
        "--experts-in", choices=EXPERT_DTYPES, default="fp4", help="format of weights (fp4)"
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dsv4.ops.moe.op import MOE, PLANS
    from dsv4.ops.runtime.backend import Device
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.kernel_call import OpKernels
    from dsv4.testing.moe import Case
    from dsv4.testing.moe_layer import LayerInputs, assert_layer_close

    sizes = (args.hidden, args.inner, args.experts, args.top_k, args.experts_in)
    options = {"is_tiled": args.arch != "sm_90a"}
    is_graded = 2 * args.top_k <= args.experts
    cases = (
        *(Case(tokens, *sizes, **options) for tokens in FEW_TOKENS),
        Case(args.tokens, *sizes, one_expert=True, **options),
        Case(args.many, *sizes, live=min(args.live, args.many), is_graded=is_graded, **options),
        Case(GATE_TOKENS, *sizes, live=FEW_TOKENS[0], **options),
    )
    config = LayerInputs.make(cases[0], args.seed).config
    if config.why_no_kernel:
        raise ValueError(f"no kernel: {config.why_no_kernel}")
    if not MOE.serves(config, args.arch):
        raise ValueError(f"no kernel: experts in {args.experts_in} on {args.arch}")
    launches = CheckedLaunches(args, args.arch)
    compiled = OpKernels(MOE, launches.target).compile(config)
    sms = (FEW_SMS,) * len(cases) if args.arch == "sm_90a" else BLACKWELL_SMS
    with launches.checks():
        for case, few in zip(cases, sms, strict=True):
            device = Device(args.arch, few)
            inputs, first = LayerInputs.make(case, args.seed), None
            tilings = PLANS[args.arch].tilings(config.kernels)
            for index, tiling in enumerate(tilings[: 1 if case is cases[-1] else None]):
                schedule = SCHEDULES[index % len(SCHEDULES)]
                make = partial(inputs.call_tiled, index, device)
                outcome = launches.run(compiled, make, schedule)
                if first is None:
                    assert_layer_close(outcome, inputs)
                    first = outcome["out"]
                assert first.equal(outcome["out"]), f"out: other bits in {tiling}"
                print(
                    f"{args.arch}, {case.num_live} of {case.tokens} tokens, {args.experts} experts "
                    f"{args.hidden} x {args.inner} in {args.experts_in}, tiles of {tiling.tokens} "
                    f"tokens, {schedule}: close, equal bits, no race"
                )
    return launches.finish()
