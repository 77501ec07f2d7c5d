"""Arguments of `sparse_fmha_paged` and of its kernels.

T tokens of n_h query heads; a window pool of pages_w pages of P_w keys and a compressed pool of
pages_c pages of P_c. A pool's keys are named by index lists [T, k], or by a table of B requests and
c columns.

A rounded output is `codes` in the C rows of T tokens, and `code_scales`; `o` is then scratch of
rows that the kernels do not round on their way. It is absent from the operator's calls.
"""

from __future__ import annotations

from collections import namedtuple

from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.kit import args
from dsv4.kernels.kit.args import In, OptIn, OptOut, Out, Scalar, Workspace, tensors_of
from dsv4.kernels.kit.head_squares import parts
from dsv4.kernels.kit.kv_entry import ALIGNMENT, FP8_ENTRY_ALIGNMENT, KV_DTYPES

_ROWS = {"dtype": "bfloat16", "also": ("float32",), "align": 16}
_POOL = {
    "dtype": "kv_dtype",
    "align": ALIGNMENT,
    "inner_align": "entry_align",
    "differentiable": True,
}

ARGS = (
    In("q", "T n_h d", **_ROWS),
    In("window_pool", "pages_w P_w row", **_POOL),
    In("window_indices", "T k_w", "int32", nullable=True),
    In("window_lens", "T", "int32", nullable=True),
    In("compressed_pool", "pages_c P_c row", **_POOL, nullable=True),
    In("compressed_indices", "T k_c", "int32", nullable=True),
    In("compressed_lens", "T", "int32", nullable=True),
    In("sink_logits", "n_h", "float32"),
    Out("o", "T n_h d", **_ROWS, public="out", nullable=True),
    OptIn("q_factor", "T n_h", "float32"),
    OptIn("q_squares", "T n_h q_parts", "float32", align=16),
    OptIn("rope", "R rope_dim", "float32", align=16),
    OptIn("positions", "T", "int32"),
    OptIn("block_table", "B_c c_c", "int32"),
    OptIn("request_ids", "T", "int32"),
    OptIn("window_table", "B_w c_w", "int32"),
    OptOut("lse", "T n_h", "float32"),
    OptOut("max_logits", "T n_h", "float32"),
    OptOut("codes", "C W", "float8_e4m3fn", align=16),
    OptOut("code_scales", "T w", "float8_e8m0fnu"),
    Workspace(),
    Scalar("num_splits"),
    Scalar("num_ctas"),
    Scalar("sliding_window"),
    Scalar("ratio"),
)
# The tensors of a call, by the names of the table.
PagedFmhaTensors = namedtuple("PagedFmhaTensors", [arg.name for arg in tensors_of(ARGS)])


def values(config: PagedFmhaConfig) -> dict[str, int | str]:
    """The sizes and dtypes that a kernel is compiled for."""
    width = config.num_query_heads * config.head_dim
    return {
        "n_h": config.num_query_heads,
        "d": config.head_dim,
        "row": config.row,
        "W": width,
        "w": -(-width // K_BLOCK),
        "rope_dim": config.rope_dim,
        "q_parts": parts(config.head_dim),
        "kv_dtype": KV_DTYPES[config.kv_format],
        "entry_align": FP8_ENTRY_ALIGNMENT if config.kv_format == "fp8" else ALIGNMENT,
    }


def fake_arguments(config: PagedFmhaConfig) -> tuple[tuple, dict]:
    """Arguments of a kernel's call without data: every size and outer stride is symbolic."""
    return args.fake_arguments(ARGS, values(config))
