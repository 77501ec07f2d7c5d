"""Arguments of the router by itself."""

from __future__ import annotations

from dsv4.kernels.kit.args import In, OptIn, Out, Scalar
from dsv4.kernels.moe.routing import RoutingConfig

# S splits, T tokens, E experts of D elements, k of them a token, P = T * k pairs, G groups.
ARGS = (
    In("x", "T D", align=16),
    In("weight", "E D", align=16),
    Out("partials", "S T E", "float32", align=16),
    Out("codes", "T D", "float8_e4m3fn", align=16),
    Out("scales", "T g", "float8_e8m0fnu"),
    Out("ids", "T k", "int32"),
    Out("weights", "T k", "float32"),
    Out("pairs", "P", "int32"),
    Out("groups", "G four", "int32", align=16),
    Out("counts", "two", "int32"),
    Out("arrivals", "two", "int32"),
    Out("run_counts", "R E", "int32"),
    OptIn("bias", "B", "float32", align=16),
    OptIn("table", "V k", "int64"),
    OptIn("input_ids", "I", "int64"),
    OptIn("live_tokens", "L", "int32"),
    Scalar("token_tiles"),
    Scalar("group_tokens"),
)


def values(config: RoutingConfig) -> dict[str, int | str]:
    """What the kernels are compiled for."""
    sizes = {"D": config.hidden, "E": config.experts, "k": config.top_k, "g": config.hidden // 128}
    return {**sizes, "four": 4, "two": 2}
