"""Arguments of `mhc_seam` and of its kernel: T tokens, n streams of D elements, g groups of 128.

The output of the sublayer before comes as y; or as the rows of k experts a token and of the shared
one, places in all, which are still to be added.
"""

from __future__ import annotations

from dsv4.kernels.kit.args import In, OptIn, OptOut, Out, Scalar, Workspace
from dsv4.kernels.seam.config import GROUP, SeamConfig

# Four elements at a time are loaded and stored. float32 is for the torch implementation.
_ROWS = {"dtype": "bfloat16", "also": ("float32",), "align": 8}

ARGS = (
    In("streams", "T n D", **_ROWS),
    In("fn", "R N", "float32", align=16),
    In("base", "R", "float32"),
    In("scale", "S", "float32"),
    In("norm_weight", "D", "float32", align=16),
    Out("x", "T D", **_ROWS),
    OptIn("y", "T D", **_ROWS),
    OptIn("post", "T n", "float32", align=16),
    OptIn("comb", "T n n", "float32", align=16),
    OptIn("rows", "T places D", **_ROWS),
    OptIn("ids", "T k", "int32"),  # below 0: no expert
    OptIn("counts", "two", "int32"),  # the second: tokens that are not padding
    OptOut("streams_out", "T n D", **_ROWS),
    OptOut("post_out", "T n", "float32", align=16),
    OptOut("comb_out", "T n n", "float32", align=16),
    OptOut("codes", "T D", "float8_e4m3fn", align=4),
    OptOut("scale_out", "T g", "float8_e8m0fnu"),
    Workspace(),
    Scalar("num_clusters"),
    Scalar("pass_tokens"),
    Scalar("parts"),
    Scalar("is_joined"),
)


def values(config: SeamConfig) -> dict[str, int | str]:
    """What a kernel is compiled for."""
    # Kernels have no constants of 0.
    rows = {"places": config.top_k + 1, "k": config.top_k} if config.top_k else {}
    return {
        "D": config.dim,
        "n": config.num_streams,
        "N": config.num_streams * config.dim,
        "R": config.rows,
        "S": config.scales,
        "g": -(-config.dim // GROUP),
        "two": 2,
        **rows,
    }
