"""Arguments of `sparse_fmha_with_swa` and of its kernels.

T tokens of n_h query heads, top_k compressed rows per token, batch requests of W window rows.
"""

from __future__ import annotations

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.kit import args
from dsv4.kernels.kit.args import In, OptIn, OptOut, Out, Scalar, Workspace

# Rows are loaded by TMA and by 128-bit loads. float32 is for the torch implementation.
_ROWS = {"dtype": "bfloat16", "also": ("float32",), "align": 16}

ARGS = (
    In("q", "T n_h head_dim", **_ROWS),
    In("compressed_kv", "T top_k head_dim", **_ROWS),
    In("swa_kv", "batch W head_dim", **_ROWS),
    In("swa_lens", "batch", "int32"),
    In("sink_logits", "n_h", "float32"),
    In("request_ids", "T", "int32"),
    Out("o", "T n_h head_dim", **_ROWS, public="out"),
    OptIn("compressed_lens", "T", "int32"),
    OptOut("lse", "T n_h", "float32"),
    Workspace(),
    Scalar("num_splits"),
    Scalar("num_ctas"),
)


def sizes(config: FmhaConfig) -> dict[str, int]:
    """The sizes that a kernel is compiled for."""
    return {"n_h": config.num_query_heads, "head_dim": config.head_dim}


def fake_arguments(config: FmhaConfig) -> tuple[tuple, dict]:
    """Arguments of a kernel's call without data: every size and outer stride is symbolic."""
    return args.fake_arguments(ARGS, sizes(config))
