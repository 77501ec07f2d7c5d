"""Arguments of `moe`: T tokens of D elements through k of E experts of inner width I, and one that
all share.

Weights and scales of the routed experts are stacked. What a configuration does not have (scales of
plain weights, a bias where a table routes, a table where scores do) has no rows.
"""

from __future__ import annotations

from dsv4.kernels.kit.args import In, InOut, OptIn, Out, Scalar, Workspace
from dsv4.kernels.moe.config import K_BLOCK
from dsv4.kernels.moe.layer_config import WEIGHT_DTYPES, MoeConfig

WHOLE_SCALES = ("w1", "w3", "w2")

ARGS = (
    In("x", "T D", also=("float32",), align=16),
    In("gate", "E D", "gate_dtype", align=16),
    In("bias", "Eb", "float32"),
    In("w1", "E I Dc", "expert_dtype", align=32),  # gate
    In("w1_scale", "Es Ir Ds", "expert_scale", align=1),
    In("w3", "E I Dc", "expert_dtype", align=32),  # up
    In("w3_scale", "Es Ir Ds", "expert_scale", align=1),
    In("w2", "E D Ic", "expert_dtype", align=32),  # down
    In("w2_scale", "Es Dr Is", "expert_scale", align=1),
    # Of NVFP4: of w1, w3 and w2; where activations are rounded to it, then of their inputs.
    In("global_scales", "N E", "float32"),
    In("shared_w1", "I D", "shared_dtype", align=16),
    In("shared_w1_scale", "i d", "shared_scale"),
    In("shared_w3", "I D", "shared_dtype", align=16),
    In("shared_w3_scale", "i d", "shared_scale"),
    In("shared_w2", "D I", "shared_dtype", align=16),
    In("shared_w2_scale", "d2 i2", "shared_scale"),
    In("table", "V k", "int64"),
    In("input_ids", "S", "int64"),
    Out("out", "T D", "out_dtype", align=16),
    InOut("scratch", "bytes", "uint8", align=64),
    OptIn("live_tokens", "L", "int32"),
    # Of x, for up to `MOST_ROUTED` tokens: the router then takes no launch of its own.
    OptIn("x_codes", "T D", "float8_e4m3fn", align=16),
    OptIn("x_scale", "T g", "float8_e8m0fnu"),
    Workspace(),
    Scalar("tiling"),
    Scalar("splits"),
    Scalar("token_tiles"),
    Scalar("group_tokens"),
    Scalar("num_sms"),
    Scalar("combines"),
)


def values(config: MoeConfig) -> dict[str, int | str]:
    """What the kernels are compiled for."""
    hidden, inner, dtype = config.hidden, config.inner, config.expert_dtype
    up_rows, up_columns = config.scale_shape(inner, hidden, dtype)
    down_rows, down_columns = config.scale_shape(hidden, inner, dtype)
    shared_up = config.scale_shape(inner, hidden, config.shared_dtype)
    shared_down = config.scale_shape(hidden, inner, config.shared_dtype)
    per_byte = 2 if dtype in ("fp4", "nvfp4") else 1
    scale_dtypes = {"fp4": "float8_e8m0fnu", "nvfp4": "float8_e4m3fn"}
    # What is absent has no rows, but kernels have no constants of 0: sizes of the call, then.
    optional = {}
    if dtype == "nvfp4" and config.form != "released":
        optional["N"] = len(WHOLE_SCALES) * (2 if config.rounds_to_nvfp4 else 1)
    if config.has_router_bias:
        optional["Eb"] = config.experts
    if dtype != "bfloat16":
        optional["Es"] = config.experts if up_rows else 0
    if config.shared_dtype != "bfloat16":
        optional |= {"i": shared_up[0], "d2": shared_down[0]}
    return {
        "D": hidden, "I": inner, "E": config.experts, "k": config.top_k,
        "g": -(-hidden // K_BLOCK),
        "Dc": hidden // per_byte, "Ic": inner // per_byte,
        "Ir": up_rows, "Ds": up_columns, "Dr": down_rows, "Is": down_columns,
        "d": shared_up[1], "i2": shared_down[1],
        "gate_dtype": config.gate_dtype,
        "expert_dtype": WEIGHT_DTYPES.get(dtype, dtype),
        "expert_scale": scale_dtypes.get(dtype, config.scale_dtype),
        "shared_dtype": WEIGHT_DTYPES.get(config.shared_dtype, config.shared_dtype),
        "shared_scale": config.scale_dtype,
        "out_dtype": config.out_dtype,
        **optional,
    }  # fmt: skip
