"""A mixture-of-experts layer, from hidden states to hidden states: its launches, and what they hand
to each other in the caller's scratch (`scratch.sections`).

Each launch begins while the one before ends. An architecture says what its experts are; the router
and the sum over a token's experts are the same on all.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import ClassVar

import cutlass
from cutlass import (
    BFloat16,
    Boolean,
    Float8E4M3FN,
    Float8E8M0FNU,
    Float32,
    Int32,
    Int64,
    Uint8,
    cute,
    select_,
)

from dsv4.kernels.gemm.quantize import as_bytes
from dsv4.kernels.moe.config import K_BLOCK
from dsv4.kernels.moe.expert_tensors import ExpertTensors, Selection
from dsv4.kernels.moe.gate import GateTensors
from dsv4.kernels.moe.layer_config import NVFP4_GROUP, MoeConfig
from dsv4.kernels.moe.packed_rows import PackedRows, PackedTokens
from dsv4.kernels.moe.routing import ARRIVAL_WORDS, COUNTER_WORDS, GROUP_WORDS, MOST_RUNS
from dsv4.kernels.moe.scratch import ALIGNMENT, sections
from dsv4.kernels.moe.select import Lists
from dsv4.kernels.moe.wide_plan import SCALE_COPIES, scale_columns

ROW_ALIGNMENT = 1  # bytes that rows of codes and of scales start at a multiple of: kernels say more


class MoeLayer:
    """Kernels of one configuration.

    Attributes:
        experts: class of the experts' kernels, of a configuration and a routing.
    """

    experts: ClassVar[type]

    def __init__(self, config: MoeConfig):
        reason = config.why_no_kernel
        assert not reason, reason
        self.config = config
        self.expert_kernels = self.experts(config.kernels, config.routing)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [T, D] bf16
        gate: cute.Tensor,  # [E, D] bf16
        bias: cute.Tensor,  # [E] fp32, or no rows
        w1: cute.Tensor,  # prepared, as everything up to shared_w2_scale
        w1_scale: cute.Tensor,
        w3: cute.Tensor,
        w3_scale: cute.Tensor,
        w2: cute.Tensor,
        w2_scale: cute.Tensor,
        global_scales: cute.Tensor,  # of NVFP4 [3, E] or [6, E] fp32, or no rows
        shared_w1: cute.Tensor,
        shared_w1_scale: cute.Tensor,
        shared_w3: cute.Tensor,
        shared_w3_scale: cute.Tensor,
        shared_w2: cute.Tensor,
        shared_w2_scale: cute.Tensor,
        table: cute.Tensor,  # [V, k] int64, or no rows
        input_ids: cute.Tensor,  # [T] int64, or no rows
        out: cute.Tensor,  # [T, D], written unless the rows are handed on
        scratch: cute.Tensor,  # [scratch_bytes] uint8
        stream,
        *,
        live_tokens: cute.Tensor,  # [1] int32, or no rows
        x_codes: cute.Tensor,  # [T, D] e4m3 of x, or no rows
        x_scale: cute.Tensor,  # [T, D / 128] E8M0, the same
        workspace: cute.Tensor,  # zeros where there are few tokens
        tiling: Int32,  # of the experts' products
        splits: Int32,  # of the gate
        token_tiles: Int32,  # of the gate; 0: it is that of many tokens
        group_tokens: Int32,  # of the tiling
        num_sms: Int32,
        combines: Int32,  # whether `out` is written
    ):
        """Launch everything."""
        tokens = x.shape[0]
        at = scratch_tensors(self.config, scratch, tokens, splits)
        codes, scales, partials = at["codes"], at["scales"], at["partials"]
        ids, weights, order = at["ids"], at["weights"], at["pairs"]
        groups, counts, arrivals, rows = at["groups"], at["counts"], at["arrivals"], at["rows"]
        taken = cute.make_tensor(arrivals.iterator + 1, cute.make_layout((1,)))
        tensors = GateTensors(x, gate, partials, codes, as_bytes(scales), arrivals)
        packed, packed_h = None, None
        if cutlass.const_expr(self.config.rounds_to_nvfp4):
            of_x = PackedRows(at["packed"], at["packed_scales"])
            packed = PackedTokens(of_x, at["packed_whole"], global_scales)
            packed_h = PackedRows(at["packed_h"], at["packed_h_scales"])
            tensors = tensors._replace(packed=packed)
        leads = self.expert_kernels.leads(Int32(tokens), tiling, x_codes, num_sms)
        has_codes = leads & (x_codes.shape[0] > 0)
        codes, scales = one_of(has_codes, x_codes, codes), one_of(has_codes, x_scale, scales)
        lists = Lists(
            partials, bias, table, input_ids, live_tokens, ids, weights, order, groups, counts,
            arrivals, at["run_counts"],
        )  # fmt: skip
        experts = ExpertTensors(
            codes, scales, w1, w1_scale, w3, w3_scale, w2, w2_scale,
            shared_w1, shared_w1_scale, shared_w3, shared_w3_scale, shared_w2, shared_w2_scale,
            groups, counts, taken, order, ids, weights, at["h"], at["h_codes"], at["h_scale"],
            rows, x, global_scales, packed, packed_h,
        )  # fmt: skip
        counter = cute.make_tensor(
            cute.recast_ptr(workspace.iterator, dtype=Int32), cute.make_layout((COUNTER_WORDS,))
        )
        selection = Selection(lists, group_tokens, tensors, token_tiles, leads, has_codes, counter)
        self.expert_kernels.launch(experts, live_tokens, selection, stream, tiling, num_sms)
        if combines != 0:
            self.expert_kernels.combine.launch(rows, ids, counts, out, stream)


def scratch_tensors(
    config: MoeConfig, scratch: cute.Tensor, tokens: Int32, splits: Int32
) -> dict[str, cute.Tensor]:
    """A tensor of each section of the scratch, with contiguous rows."""
    k, pairs = config.top_k, tokens * config.top_k
    starts = sections(config, Int64(tokens), Int64(splits))
    h_rows, h_blocks = pairs + tokens, config.inner // K_BLOCK
    shapes = {
        "partials": (Float32, (splits, tokens, config.experts)),
        "codes": (Float8E4M3FN, (tokens, config.hidden)),
        "scales": (Float8E8M0FNU, (tokens, config.hidden // K_BLOCK)),
        "ids": (Int32, (tokens, k)),
        "weights": (Float32, (tokens, k)),
        "pairs": (Int32, (pairs,)),
        "groups": (Int32, (pairs + 1, GROUP_WORDS)),
        "counts": (Int32, (2,)),
        "arrivals": (Int32, (ARRIVAL_WORDS,)),
        "run_counts": (Int32, (MOST_RUNS, config.experts)),
        "h": (BFloat16, (h_rows, config.inner)),
        "h_codes": (Float8E4M3FN, (h_rows, config.inner)),
        "h_scale": (Float32, (SCALE_COPIES * h_blocks, scale_columns(h_rows))),
        "rows": (BFloat16, (tokens, k + 1, config.hidden)),
    }
    if config.rounds_to_nvfp4:
        shapes |= {
            "packed": (Uint8, (tokens, config.hidden // 2)),
            "packed_scales": (Uint8, (tokens, config.hidden // NVFP4_GROUP)),
            "packed_whole": (Float32, (1,)),
            "packed_h": (Uint8, (pairs, config.inner // 2)),
            "packed_h_scales": (Uint8, (pairs, config.inner // NVFP4_GROUP)),
        }
    tensors = {}
    for name, (dtype, shape) in shapes.items():
        address = (scratch.iterator + starts[name]).toint()
        start = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=ALIGNMENT)
        strides = (*accumulate(shape[:0:-1], mul),)[::-1]
        tensors[name] = cute.make_tensor(start, cute.make_layout(shape, stride=(*strides, 1)))
    return tensors


def one_of(is_first: Boolean, first: cute.Tensor, other: cute.Tensor) -> cute.Tensor:
    """One of two tensors of a dtype and a shape."""
    addresses = (Int64(tensor.iterator.toint()) for tensor in (first, other))
    strides = (Int64(tensor.stride[0]) for tensor in (first, other))
    address, stride = (select_(is_first, *pair) for pair in (addresses, strides))
    start = cute.make_ptr(
        other.element_type, Int64(address), cute.AddressSpace.gmem, assumed_align=ROW_ALIGNMENT
    )
    return cute.make_tensor(start, cute.make_layout(other.shape, stride=(Int64(stride), 1)))
