"""Context of the kernel of FP8 codes: what its roles share while it is traced; frozen, as
`heads_m_context` says why."""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.memory import SmemAllocator

from dsv4.kernels.attention.sm90.codes_plan import PLACES, QUERY_SCALES, SCORE_WARPS, CodesPlan
from dsv4.kernels.attention.sm90.plan import HALVES, HEADS, KEYS
from dsv4.kernels.kit import mbarrier
from dsv4.kernels.kit.kv_entry import GROUP, ROPE_DIM
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.kit.swizzle import SPAN_BYTES, operand_atoms
from dsv4.kernels.kit.wgmma import make_mma

CODE, DTYPE = cutlass.Float8E4M3FN, cutlass.BFloat16
CODE_STEP = 32  # columns of a product of codes
ROPE_STEP = 16  # of bf16
HALF_HEADS = HEADS // HALVES


@dataclass(frozen=True)
class Smem:
    """Views of shared memory; spans of codes are 64 bytes, those of bf16 128."""

    k_codes: cute.Tensor  # swizzled [key, column, stage]
    k_rope: cute.Tensor  # the same of rotated columns
    v_rope: cute.Tensor  # the same bytes as [rotated column, key, stage]
    q_codes: cute.Tensor  # swizzled [head, column, term]
    q_rope: cute.Tensor  # swizzled [head, rotated column]
    # Swizzled [head of a half, key, half x term x place], keys as `codes_softmax` orders them.
    p_codes: cute.Tensor
    p_rope: cute.Tensor  # swizzled [head of a half, key, half x place]
    codes_start: cute.Pointer
    rope_start: cute.Pointer
    q_codes_start: cute.Pointer
    q_rope_start: cute.Pointer
    p_codes_start: cute.Pointer
    p_rope_start: cute.Pointer
    scales: cute.Tensor  # [key, stage]
    rescale: cute.Tensor  # [head, place]
    changes: cute.Tensor  # [score warp, place]
    row_scale: cute.Tensor  # [row]
    row_inputs: cute.Tensor  # [input, row]
    span: cute.Tensor  # words of a KeySpan
    tile_info: cute.Tensor  # [stage x 4]


@dataclass(frozen=True)
class Pipelines:
    """The edges of `CodesPlan.barriers`."""

    span: mbarrier.Buffer
    p: mbarrier.Ring
    rows: mbarrier.Buffer
    kv: mbarrier.FencedRing
    values: mbarrier.Ring  # the same without a fence: for those whom P reaches, which has one


def allocate(plan: CodesPlan) -> tuple[Smem, Pipelines]:
    """Shared memory of a CTA: its views, and the mbarriers in it."""
    storage = SmemAllocator().allocate(storage_struct(plan.smem))
    codes, _ = operand_atoms(CODE, GROUP)
    rows, columns = operand_atoms(DTYPE, SPAN_BYTES)

    def view(buffer, atom, shape, order=(0, 1, 2)):
        layout = cute.tile_to_shape(atom, shape, order=order)
        return buffer.get_tensor(layout.outer, swizzle=layout.inner)

    stages, places, rope = plan.stages, PLACES, ROPE_DIM
    inputs = cute.make_layout((QUERY_SCALES + 1, HEADS), stride=(HEADS, 1))
    smem = Smem(
        k_codes=view(storage.k_codes, codes, (KEYS, plan.codes, stages)),
        k_rope=view(storage.k_rope, rows, (KEYS, rope, stages)),
        v_rope=view(storage.k_rope, columns, (rope, KEYS, stages), (1, 0, 2)),
        q_codes=view(storage.q_codes, codes, (HEADS, plan.codes, plan.terms)),
        q_rope=view(storage.q_rope, rows, (HEADS, rope), (0, 1)),
        p_codes=view(storage.p_codes, codes, (HALF_HEADS, KEYS, HALVES * plan.terms * places)),
        p_rope=view(storage.p_rope, rows, (HALF_HEADS, KEYS, HALVES * places)),
        codes_start=storage.k_codes.data_ptr(),
        rope_start=storage.k_rope.data_ptr(),
        q_codes_start=storage.q_codes.data_ptr(),
        q_rope_start=storage.q_rope.data_ptr(),
        p_codes_start=storage.p_codes.data_ptr(),
        p_rope_start=storage.p_rope.data_ptr(),
        scales=storage.scales.get_tensor(cute.make_layout((KEYS, stages))),
        rescale=storage.rescale.get_tensor(cute.make_layout((HEADS, places))),
        changes=storage.changes.get_tensor(cute.make_layout((SCORE_WARPS, places))),
        row_scale=storage.row_scale.get_tensor(cute.make_layout(HEADS)),
        row_inputs=storage.row_inputs.get_tensor(inputs),
        span=storage.span.get_tensor(cute.make_layout(plan.smem["span"].count)),
        tile_info=storage.tile_info.get_tensor(cute.make_layout(plan.smem["tile_info"].count)),
    )
    pipes = {
        edge.name: mbarrier.pipeline(plan.barriers, storage, edge.name)
        for edge in plan.barriers.edges
    }
    # cp.async fills it, products read it.
    pipes["values"] = pipes["kv"]
    pipes["kv"] = mbarrier.FencedRing(**vars(pipes["kv"]))
    return smem, Pipelines(**pipes)


def scores_mma():
    """S = Q K^T over codes."""
    return make_mma(CODE, (HEADS, KEYS), OperandMajorMode.K)


def rope_scores_mma():
    """The same over rotated columns."""
    return make_mma(DTYPE, (HEADS, KEYS), OperandMajorMode.K)


def values_mma():
    """O^T = V^T P^T of half of the heads over codes: V, transposed, is in registers."""
    return make_mma(CODE, (GROUP, HALF_HEADS), OperandMajorMode.K, True)


def rope_values_mma():
    """The same of rotated columns, which lie in shared memory by keys."""
    major = OperandMajorMode
    return make_mma(DTYPE, (ROPE_DIM, HALF_HEADS), major.K, a_major=major.MN)
