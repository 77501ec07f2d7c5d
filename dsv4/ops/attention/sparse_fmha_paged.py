"""`sparse_fmha_paged`: attention over pages of keys, as engines call it: function and operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import index
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.kernels.attention import paged_plan
from dsv4.kernels.attention.paged_args import ARGS, PagedFmhaTensors, values
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.kit.kv_entry import ROPE_DIM
from dsv4.ops.attention import paged_checks, paged_launch, paged_torch
from dsv4.ops.attention.sparse_fmha import MODEL_HEAD_DIM, MODEL_HEADS
from dsv4.ops.code_terms import empty_terms
from dsv4.ops.pools import check_dtype
from dsv4.ops.rms_norm_fp8 import MODEL_EPS
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.checks import check_flag
from dsv4.ops.runtime.kernel_op import KernelOp, Sizes
from dsv4.ops.runtime.launch import Launch
from dsv4.ops.runtime.state import State
from dsv4.quoting import quoted

WHOLE_MODEL_HEADS = (128, 64)  # of Pro and Flash on one GPU
_FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class SparseFmhaPaged(KernelOp):
    """Attention over entries of two paged pools that index lists or tables name, with a sink."""

    name = "sparse_fmha_paged"
    config = PagedFmhaConfig
    args = ARGS
    kernels: ClassVar = {
        "sm_90a": "dsv4.kernels.attention.sm90.paged",
        "sm_100a": "dsv4.kernels.attention.sm100.paged",
    }
    early = (
        "window_lens",
        "compressed_lens",
        "positions",
        "request_ids",
        "window_table",
        "block_table",
        "rope",
        "sink_logits",
    )

    def values(self, config: PagedFmhaConfig) -> Mapping[str, int | str]:
        return values(config)

    def has_kernel(self, config: PagedFmhaConfig) -> bool:
        return paged_plan.has_kernel(config)

    def compiled_config(self, config: PagedFmhaConfig, arch: str) -> PagedFmhaConfig:
        """Blank what the kernel takes at run time; of a fixed number of splits remains that it is
        fixed, where the kernel is otherwise one of two. And products of codes where there are
        none."""
        has_codes = paged_plan.multiplies_codes(config)
        return replace(
            config,
            softmax_scale=config.scale,
            sliding_window=0,
            ratio=0,
            num_splits=None if config.num_splits is None else 1,
            compute=config.compute if has_codes else "bf16",
        )

    def plan(self, config: PagedFmhaConfig, sizes: Sizes, device: Device) -> tuple[int, ...]:
        return paged_plan.scalars(config, sizes, device.num_sms, device.arch)

    def workspace_size(
        self, config: PagedFmhaConfig, sizes: Sizes, scalars: tuple[int, ...]
    ) -> int:
        return paged_plan.workspace_size(config, sizes, scalars)

    def max_workspace_size(self, config: PagedFmhaConfig, rows: int, device: Device) -> int:
        return paged_plan.max_workspace_size(config, rows, device.num_sms, device.arch)

    def needs(self, config: PagedFmhaConfig, name: str) -> bool | None:
        if name in ("codes", "code_scales"):
            return config.rounds_output
        if name in ("lse", "max_logits") and config.rounds_output:
            return False
        return not config.rounds_output if name == "o" else None

    def check_sizes(self, config: PagedFmhaConfig, *tensors: Tensor | None) -> None:
        paged_checks.check_sizes(config, PagedFmhaTensors(*tensors))

    def torch(self, config: PagedFmhaConfig, *tensors: Tensor | None) -> None:
        paged_torch.sparse_fmha_paged(config, PagedFmhaTensors(*tensors, workspace=None))

    def make_launch(self, state: State) -> Launch:
        return paged_launch.make_launch(state)

    def probes(
        self, config: PagedFmhaConfig, target: Device, device: torch.device
    ) -> Iterator[tuple[Tensor | int, ...]]:
        """A token without keys, unsplit and split; as if it filled the device, where kernels round
        the output then."""
        for splits in (1, 2):
            yield paged_launch.smallest_call(self, config, splits, target, device)
        if config.rounds_output:
            one = target._replace(num_sms=1)
            yield paged_launch.smallest_call(self, config, 1, one, device)

    def aot(self) -> Mapping[str, PagedFmhaConfig]:
        """What Flash and Pro need, on one GPU and under tensor parallelism; and on one GPU with the
        bits that a request has alone, and in codes for the output projection of many tokens."""
        sizes = [(heads, kv_format) for heads in MODEL_HEADS for kv_format in ("bf16", "fp8")]
        found = {
            f"{heads} heads, {kv_format}{label}": PagedFmhaConfig(
                MODEL_HEAD_DIM, heads, kv_format, q_eps=q_eps
            )
            for heads, kv_format in sizes
            for label, q_eps in (("", None), (", norm of q", MODEL_EPS))
        }
        for heads, kv_format in sizes:
            if heads in WHOLE_MODEL_HEADS:
                label = f"{heads} heads, {kv_format}, norm of q, batch-invariant"
                found[label] = PagedFmhaConfig(
                    MODEL_HEAD_DIM, heads, kv_format, batch_invariant=True, q_eps=MODEL_EPS
                )
                for source in (f"{heads} heads, {kv_format}, norm of q", label):
                    found[f"{source}, codes"] = replace(found[source], rounds_output=True)
        return found

    def aot_for(self, arch: str) -> Mapping[str, PagedFmhaConfig]:
        """Those, and products of FP8 codes where there are such kernels."""
        codes = {
            f"{heads} heads, fp8, {compute} products{label}": PagedFmhaConfig(
                MODEL_HEAD_DIM, heads, "fp8", compute=compute, q_eps=q_eps
            )
            for heads in MODEL_HEADS
            for compute in ("fp8", "fp8x2")
            for label, q_eps in (("", None), (", norm of q", MODEL_EPS))
        }
        served = {
            label: config for label, config in codes.items() if paged_plan.multiplies_codes(config)
        }
        return {**self.aot(), **served}


SPARSE_FMHA_PAGED = SparseFmhaPaged()
_op = SPARSE_FMHA_PAGED.overload


def sparse_fmha_paged(
    q: Tensor,
    window_pool: Tensor,
    window_indices: Tensor | None,
    window_lens: Tensor | None,
    compressed_pool: Tensor | None,
    compressed_indices: Tensor | None,
    compressed_lens: Tensor | None,
    sink_logits: Tensor,
    *,
    sink_mode: str,
    q_factor: Tensor | None = None,
    q_squares: Tensor | None = None,
    q_eps: float | None = None,
    rope: Tensor | None = None,
    positions: Tensor | None = None,
    block_table: Tensor | None = None,
    request_ids: Tensor | None = None,
    window_table: Tensor | None = None,
    sliding_window: int = 0,
    ratio: int = 0,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    compute: str = "bf16",
    rope_dim: int | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Attention of T tokens over entries of a window pool and a compressed pool, where they lie.

    Both pools hold bf16 rows, or both FP8 entries as FlashMLA, vLLM and SGLang store them: a page
    of P entries of 512 channels is P records of 576 bytes (448 e4m3, 64 bf16), then P records of 8
    bytes (7 E8M0 scales, a zero); `dsv4.kernels.kit.kv_entry` has the geometry of any head_dim.

    A pool's keys are named per token by an index list: slots page * P + entry. What is below 0,
    past the pool or past the token's length is no key, and never read. Or by a table of pages per
    request: window_table gives the last `sliding_window` positions up to a token's own,
    block_table its (position + 1) // ratio complete entries; entry n lies in column n // P of the
    request's row. The window starts over behind the last column: a ring is a table of one column.
    A page outside the pool holds no key.

    Sinks and both modes: see `sparse_fmha_with_swa`.

    Args:
        q: [T, n_h, head_dim] bfloat16; or float32, on GPUs too by the torch implementation.
        window_pool: [pages, P, head_dim] in the dtype of q, or [pages, P, entry bytes] of a
            one-byte dtype; pages may lie apart, FP8 pages at multiples of 16 bytes.
        window_indices: [T, k] int32, k up to 8,192, rows may lie apart; None: window_table.
        window_lens: [T] int32, leading columns in use, clamped to 0..k; None: all.
        compressed_pool: as window_pool, pages of another size; None: no compressed entries.
        compressed_indices, compressed_lens: the same for it; None: block_table.
        sink_logits: [n_h] float32, natural-log domain, not scaled by `softmax_scale`.
        sink_mode: "softmax" or "swa_gate"; no default, because the two differ silently.
        q_factor: [T, n_h] float32 on the scores of a token's head, such as a norm of q. Blackwell's
            kernels take positive ones: with 0 or less, rows of o and lse are undefined there.
        q_squares: [T, n_h, head_dim / 16] float32, sums of squares of 16 channels of q each, as the
            epilogue `HeadRotation` of q's projection leaves them, in place of q_factor: the factor
            is then 1 / sqrt(sum / head_dim + q_eps), a norm of q without a weight.
        q_eps: beside q_squares.
        rope: [R, rope_dim] float32, cosines then sines per position: the last channels of o, pairs
            of neighbours, are turned back by the rotation of the token's position before o is
            rounded. Positions are clamped to 0..R - 1.
        positions: [T] int32, for rope and tables; negative ones see nothing by a table.
        block_table: [requests, columns] int32, pages of compressed_pool; without window_indices
            and window_table those of window_pool, too.
        request_ids: [T] int32, rows of the tables; a token of a negative one is padding: o = 0.
        window_table: [requests, columns] int32, pages of window_pool.
            GPUs read lens, tables, `positions`, `request_ids`, `rope` and `sink_logits` while the
            launch before may still run: they must not be what a kernel with programmatic dependent
            launch just wrote.
        sliding_window, ratio: of tables.
        softmax_scale: factor on q . k; default head_dim ** -0.5.
        num_splits: KV splits of the GPU kernel; default chosen by the size of the launch.
        batch_invariant: a token's bits depend on its own keys alone, not on the batch. Splits then
            follow from its own number of keys: as few as have up to 18 tiles of 64 keys of a pool,
            one of 1,152 keys (on Hopper; elsewhere always one). Calls of many tokens with longer
            lists take several launches.
        compute: "bf16"; "fp8" and "fp8x2" multiply FP8 codes, in one and two terms, of entries
            whose groups share one scale, which the caller promises. Kernels do so with more
            than 32 heads and without splits, and multiply bf16 values otherwise; torch does.
        rope_dim: rotated channels, bf16 in FP8 entries; default those of `rope`, or 64.
        out: [T, n_h, head_dim] to write into; default a new tensor.
        return_lse: also return lse [T, n_h] float32, see `sparse_fmha_with_swa`.
        return_max_logits: also return the largest score of a key [T, n_h] float32, -inf without.

    Returns:
        o [T, n_h, head_dim] in the dtype of q, or a tuple of it and what else is asked for.

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    window_table, block_table = _tables(window_indices, compressed_pool, window_table, block_table)
    lists = [window_pool, window_indices, window_lens]
    lists += [compressed_pool, compressed_indices, compressed_lens]
    options = [q_factor, q_squares, rope, positions, block_table, request_ids, window_table]
    try:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            SPARSE_FMHA_PAGED.check_no_gradients(q, *lists, sink_logits, out, *options)
        lists[0], lists[3] = _bytes(window_pool), _bytes(compressed_pool)
        identity = _runner_id_of(
            q,
            lists[0],
            rope,
            sink_mode=sink_mode,
            softmax_scale=softmax_scale,
            sliding_window=sliding_window,
            ratio=ratio,
            num_splits=num_splits,
            batch_invariant=batch_invariant,
            compute=compute,
            rope_dim=rope_dim,
            q_eps=q_eps,
        )
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        shape, kind = q.shape[:2], {"dtype": torch.float32, "device": q.device}
        lse = torch.empty(shape, **kind) if return_lse else None
        highest = torch.empty(shape, **kind) if return_max_logits else None
        _op(q, *lists, sink_logits, out, identity, *options, lse, highest)
    except Exception:
        check_dtype("window_pool", window_pool)
        SPARSE_FMHA_PAGED.explain(q, *lists, sink_logits, out, *options, None, None)
        check_flag("return_lse", return_lse)
        check_flag("return_max_logits", return_max_logits)
        raise
    more = tuple(tensor for tensor in (lse, highest) if tensor is not None)
    return (out, *more) if more else out


def sparse_fmha_paged_fp8(
    q: Tensor,
    window_pool: Tensor,
    window_indices: Tensor | None,
    window_lens: Tensor | None,
    compressed_pool: Tensor | None,
    compressed_indices: Tensor | None,
    compressed_lens: Tensor | None,
    sink_logits: Tensor,
    *,
    sink_mode: str,
    q_factor: Tensor | None = None,
    q_squares: Tensor | None = None,
    q_eps: float | None = None,
    rope: Tensor | None = None,
    positions: Tensor | None = None,
    block_table: Tensor | None = None,
    request_ids: Tensor | None = None,
    window_table: Tensor | None = None,
    sliding_window: int = 0,
    ratio: int = 0,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    compute: str = "bf16",
    rope_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`sparse_fmha_paged` whose output is split as the input of a grouped linear.

    o in bfloat16 becomes the sum of two e4m3 terms, with one power-of-two scale per 128 channels,
    as `dsv4.ops.code_terms.to_terms` does it: what a launch before `grouped_linear` does of many
    tokens. Attention does so on its way on Hopper with more than 24 heads, but for small launches
    of 32, 64 and 128 heads and batch-invariant ones of long lists, and on Blackwell, but for
    pairs of CTAs with several tokens. Others, and products of codes, write o into scratch, and a
    launch behind them rounds it.

    Args:
        all: as `sparse_fmha_paged` takes them; head_dim is a multiple of 128.

    Returns:
        (codes [C, n_h * head_dim] float8_e4m3fn, scales [T, n_h * head_dim / 128] float8_e8m0fnu),
        what `grouped_linear` takes as `x` and `x_scale`: 16 rows for each 8 tokens, of which those
        of no token are undefined.

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    window_table, block_table = _tables(window_indices, compressed_pool, window_table, block_table)
    lists = [window_pool, window_indices, window_lens]
    lists += [compressed_pool, compressed_indices, compressed_lens]
    options = [q_factor, q_squares, rope, positions, block_table, request_ids, window_table]
    try:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            SPARSE_FMHA_PAGED.check_no_gradients(q, *lists, sink_logits, None, *options)
        lists[0], lists[3] = _bytes(window_pool), _bytes(compressed_pool)
        identity = _runner_id_of(
            q,
            lists[0],
            rope,
            sink_mode=sink_mode,
            softmax_scale=softmax_scale,
            sliding_window=sliding_window,
            ratio=ratio,
            num_splits=num_splits,
            batch_invariant=batch_invariant,
            compute=compute,
            rope_dim=rope_dim,
            q_eps=q_eps,
            rounds_output=True,
        )
        codes, scales = empty_terms(q.shape[0], q.shape[1] * q.shape[2], q.device)
        _op(q, *lists, sink_logits, None, identity, *options, None, None, codes, scales)
    except Exception:
        check_dtype("window_pool", window_pool)
        SPARSE_FMHA_PAGED.explain(q, *lists, sink_logits, None, *options, None, None)
        raise
    return codes, scales


def _tables(
    window_indices: Tensor | None,
    compressed_pool: Tensor | None,
    window_table: Tensor | None,
    block_table: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Tables of the window's pages and of the entries': without lists one may stand for both."""
    if block_table is not None and window_indices is None and window_table is None:
        window_table = block_table
    if compressed_pool is None and window_table is block_table:
        block_table = None
    return window_table, block_table


def _runner_id_of(
    q: Tensor,
    window_pool: Tensor,
    rope: Tensor | None,
    *,
    rope_dim: int | None,
    sliding_window: int,
    ratio: int,
    num_splits: int | None,
    **fields: Any,
) -> int:
    """Id of a call's configuration."""
    _, heads, head_dim = q.shape
    if rope_dim is None:
        rope_dim = min(ROPE_DIM, head_dim) if rope is None else rope.shape[1]
    # index(): under torch.compile sizes may be symbolic, and a runner's are constants.
    return sparse_fmha_paged_runner_id(
        index(head_dim),
        index(heads),
        _FORMATS.get(window_pool.dtype, "fp8"),
        sliding_window=_integer("sliding_window", sliding_window),
        ratio=_integer("ratio", ratio),
        num_splits=None if num_splits is None else _integer("num_splits", num_splits),
        rope_dim=_integer("rope_dim", rope_dim),
        **fields,
    )


@torch.compiler.assume_constant_result
def sparse_fmha_paged_runner_id(
    head_dim: int,
    num_query_heads: int,
    kv_format: str = "bf16",
    *,
    sink_mode: str,
    softmax_scale: float | None = None,
    sliding_window: int = 0,
    ratio: int = 0,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    compute: str = "bf16",
    rope_dim: int = ROPE_DIM,
    q_eps: float | None = None,
    rounds_output: bool = False,
) -> int:
    """Id of a configuration: what `torch.ops.dsv4.sparse_fmha_paged` takes.

    Args:
        kv_format: of both pools, "bf16" or "fp8"; "fp32" beside float32 queries.
        rounds_output: whether it is that of `sparse_fmha_paged_fp8`.
        others: as in `sparse_fmha_paged`.
    """
    return SPARSE_FMHA_PAGED.runner_id(
        head_dim,
        num_query_heads,
        kv_format,
        sink_mode,
        softmax_scale,
        sliding_window,
        ratio,
        num_splits,
        batch_invariant,
        compute,
        rope_dim,
        q_eps,
        rounds_output,
    )


def _integer(name: str, value: object) -> int:
    """An integer, symbolic ones too."""
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name}: got {quoted(value)}, needs an integer") from None


def _bytes(pool: Tensor | None) -> Tensor | None:
    """FP8 entries as bytes, whatever one-byte dtype they are in."""
    if isinstance(pool, Tensor) and pool.dtype.itemsize == 1 and pool.dtype != torch.uint8:
        return pool.view(torch.uint8)
    return pool
