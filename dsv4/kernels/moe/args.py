"""Arguments of the experts' kernels, from the lists of pairs to the sum over experts.

T tokens go to k experts each: P = T k pairs of a token and an expert. A pair's position is its
place in the list sorted by expert, then by token. Weights are prepared (`layout`): their shapes and
sizes are the checkpoint's, their bytes lie in the order of the kernels' reads.
"""

from __future__ import annotations

from dsv4.kernels.kit.args import In, InOut, Out, Scalar
from dsv4.kernels.moe.config import FP4_GROUP, K_BLOCK, ExpertsConfig
from dsv4.kernels.moe.wide_plan import SCALE_COPIES

ARGS = (
    In("x_codes", "T D", "float8_e4m3fn", align=16),
    In("x_scale", "T d", "float8_e8m0fnu"),
    In("w1", "E I Dc", "weight_dtype", align=32),  # gate
    In("s1", "E Ir Ds", "scale_dtype"),
    In("w3", "E I Dc", "weight_dtype", align=32),  # up
    In("s3", "E Ir Ds", "scale_dtype"),
    In("w2", "E D Ic", "weight_dtype", align=32),  # down
    In("s2", "E Dr Is", "scale_dtype"),
    In("shared_w1", "I D", "float8_e4m3fn", align=16),
    In("shared_s1", "i d", "shared_scale_dtype"),
    In("shared_w3", "I D", "float8_e4m3fn", align=16),
    In("shared_s3", "i d", "shared_scale_dtype"),
    In("shared_w2", "D I", "float8_e4m3fn", align=16),
    In("shared_s2", "d i", "shared_scale_dtype"),
    # (expert, first position, positions, tiles of h that are there): at most a tile's tokens of one
    # expert, ascending. Of h there is nothing before the launch.
    InOut("groups", "G four", "int32", align=16),
    In("counts", "two", "int32"),  # groups there are, tokens that are no padding
    InOut("taken", "one", "int32"),  # tiles of both products; 0 before the launch
    In("pairs", "P", "int32"),  # by position: token * k + place among the token's experts
    In("ids", "T k", "int32"),  # experts of a token, ascending; -1: none
    In("weights", "T k", "float32"),  # in the order of `ids`
    Out("h", "R I", "bfloat16", align=16),  # R = P + T: routed by position, then shared by token
    # Of h, where many tokens go to an expert.
    Out("h_codes", "R I", "float8_e4m3fn", align=16),
    Out("h_scale", "i2 Q", "float32", align=16),  # Q: `wide_plan.scale_columns(R)`
    Out("rows", "T k1 D", "bfloat16", align=16),  # by place among a token's experts; last: shared
    Out("y", "T D", "out_dtype", align=16),
    Scalar("tiling"),
    Scalar("num_sms"),
)


def values(config: ExpertsConfig) -> dict[str, int | str]:
    """What the kernels are compiled for."""
    hidden, inner = config.hidden, config.inner
    is_fp4 = config.expert_dtype == "fp4"
    group = FP4_GROUP if is_fp4 else K_BLOCK
    return {
        "D": hidden,
        "I": inner,
        "d": hidden // K_BLOCK,
        "i": inner // K_BLOCK,
        "i2": SCALE_COPIES * inner // K_BLOCK,
        "k": config.top_k,
        "k1": config.top_k + 1,
        "four": 4,
        "two": 2,
        "one": 1,
        "Dc": hidden // 2 if is_fp4 else hidden,
        "Ic": inner // 2 if is_fp4 else inner,
        "Ds": hidden // group,
        "Is": inner // group,
        "Dr": hidden if is_fp4 else hidden // K_BLOCK,
        "Ir": inner if is_fp4 else inner // K_BLOCK,
        "weight_dtype": "int8" if is_fp4 else "float8_e4m3fn",
        "scale_dtype": "float8_e8m0fnu" if is_fp4 else config.scale_dtype,
        "shared_scale_dtype": config.shared_scale_dtype,
        "out_dtype": config.out_dtype,
    }
