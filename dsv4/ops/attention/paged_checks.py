"""Checks that the argument table of `sparse_fmha_paged` cannot express."""

from __future__ import annotations

from math import gcd

from torch import Tensor, float32

from dsv4.kernels.attention.paged_args import PagedFmhaTensors
from dsv4.kernels.attention.paged_config import MAX_TOP_K, PagedFmhaConfig
from dsv4.ops.code_terms import num_term_rows
from dsv4.quoting import quoted

MAX_SLOTS = 2**31 - 1


def check_sizes(config: PagedFmhaConfig, given: PagedFmhaTensors) -> None:
    """Check which arguments are given, and the pools: metadata alone."""
    check_output(config, given)
    for name in ("window_pool", "compressed_pool"):
        pool = getattr(given, name)
        if pool is not None:
            check_pool(config, name, pool, given.q)
    window_table, block_table = given.window_table, given.block_table
    tokens = given.q.shape[0]
    check_form("window", tokens, given.window_indices, given.window_lens, window_table)
    if (given.window_indices is None) == (window_table is None):
        raise ValueError("window_indices and window_table: needs exactly one of both")
    compressed = (given.compressed_indices, given.compressed_lens, block_table)
    check_form("compressed", tokens, *compressed)
    named = given.compressed_indices is not None or block_table is not None
    if named != (given.compressed_pool is not None):
        raise ValueError(
            "compressed_pool: needs compressed_indices or block_table beside it, and these need it"
        )
    if config.sliding_window == 0 and window_table is not None:
        raise ValueError("sliding_window: got 0, window_table needs at least 1")
    if config.ratio == 0 and block_table is not None:
        raise ValueError("ratio: got 0, block_table needs at least 1")
    if given.q_factor is not None and given.q_squares is not None:
        raise ValueError("q_factor and q_squares: got both, needs one")
    if (given.q_squares is None) != (config.q_eps is None):
        missing = "q_squares" if given.q_squares is None else "q_eps"
        raise ValueError(f"{missing}: got None, q_squares and q_eps go together")
    uses = [name for name in ("window_table", "block_table") if getattr(given, name) is not None]
    if uses and given.request_ids is None:
        raise ValueError(f"request_ids: got None, {uses[0]} needs them")
    if given.rope is not None:
        uses.append("rope")
        if given.rope.shape[0] == 0:
            raise ValueError("rope: got no rows, needs one per position")
    if uses and given.positions is None:
        raise ValueError(f"positions: got None, {uses[0]} needs them")


def check_output(config: PagedFmhaConfig, given: PagedFmhaTensors) -> None:
    """Check that the output is asked for in one form: rows, or their codes and nothing else."""
    rows, codes = ("o", "lse", "max_logits"), ("codes", "code_scales")
    if not config.rounds_output:
        if given.o is None:
            raise TypeError("o (out): got None, needs a torch.Tensor")
        unwanted = codes
    else:
        for name in codes:
            if getattr(given, name) is None:
                raise ValueError(f"{name}: got nothing, a rounded output needs it")
        tokens, found = given.q.shape[0], given.codes.shape[0]
        if found != num_term_rows(tokens):
            needed = num_term_rows(tokens)
            raise ValueError(f"codes: got {found} rows, {tokens} tokens need {needed}")
        unwanted = rows
    for name in unwanted:
        if getattr(given, name) is not None:
            raise ValueError(f"{name}: got a tensor, rounds_output is {config.rounds_output}")


def check_coordinates(given: PagedFmhaTensors) -> None:
    """Check that rows of the pools are named by 31 bits, as TMA gathers them: it has a single
    stride, the greatest that divides the pool's."""
    for name in ("window_pool", "compressed_pool"):
        pool = getattr(given, name)
        if pool is not None and pool.numel():
            pages, rows, width = pool.shape
            page, row, _ = pool.stride()
            row = row if rows > 1 else width
            step = gcd(page if pages > 1 else row, row)
            last = ((pages - 1) * page + (rows - 1) * row) // step
            if last > MAX_SLOTS:
                raise ValueError(
                    f"{name}: its last row is {last} times {step} elements behind its first, which "
                    f"divide its strides; needs at most {MAX_SLOTS} times"
                )


def check_form(
    branch: str,
    tokens: int,
    indices: Tensor | None,
    lens: Tensor | None,
    table: Tensor | None,
) -> None:
    """Check that a branch names its keys in one way; without tokens a table needs no request."""
    table_name = "window_table" if branch == "window" else "block_table"
    if indices is not None and table is not None:
        raise ValueError(f"{branch}_indices and {table_name}: got both, needs one")
    if lens is not None and indices is None:
        raise ValueError(f"{branch}_lens: got lengths without {branch}_indices")
    if tokens and table is not None and table.numel() == 0:
        raise ValueError(f"{table_name}: got shape {quoted(table.shape)}, needs a row and a column")
    if indices is not None and indices.shape[1] > MAX_TOP_K:
        raise ValueError(
            f"{branch}_indices: got {indices.shape[1]} columns, needs at most {MAX_TOP_K}"
        )


def check_pool(config: PagedFmhaConfig, name: str, pool: Tensor, q: Tensor) -> None:
    """Check the layout of a pool."""
    pages, size, row = pool.shape
    if pages and not size:
        raise ValueError(f"{name}: got shape {quoted(pool.shape)}, a page needs an entry")
    if pages * size > MAX_SLOTS:
        raise ValueError(f"{name}: got {pages * size} entries, needs at most {MAX_SLOTS}")
    if config.kv_format == "fp8" and size > 1 and pool.stride(1) != row:
        raise ValueError(
            f"{name}: got strides {quoted(pool.stride())}, each page of FP8 entries must be "
            f"contiguous: [any, {row}, 1]"
        )
    if config.kv_format == "fp32" and q.dtype != float32:
        raise TypeError(f"{name}: got {pool.dtype}, {q.dtype} queries need bfloat16 or FP8 keys")
    if config.kv_format == "bf16" and q.dtype == float32:
        raise TypeError(f"{name}: got {pool.dtype}, {q.dtype} queries need float32 or FP8 keys")
