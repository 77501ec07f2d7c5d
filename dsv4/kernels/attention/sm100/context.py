"""Typed contexts of the Blackwell attention kernels: kernel parameters, work tiles, views."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import TmemAllocator

from dsv4.kernels.attention.key_span import SeqlenInfo


class KernelParams(NamedTuple):
    """Parameters of a launch: TMA descriptors and small tables."""

    q: cpasync.TmaInfo | cute.Tensor  # [n_h, head_dim, T]; with 2 CTAs [T, n_h, head_dim]
    compressed: cpasync.TmaInfo  # [top_k, head_dim, T]
    window: cpasync.TmaInfo  # [W, head_dim, batch]
    o: cpasync.TmaInfo  # [n_h, head_dim, T]
    compressed_rows: Int32  # top_k, W: the descriptor of an empty tensor claims one row
    window_rows: Int32
    swa_lens: cute.Tensor
    sink_logits: cute.Tensor
    request_ids: cute.Tensor
    compressed_lens: cute.Tensor
    lse: cute.Tensor
    workspace: cute.Tensor
    num_splits: Int32
    by_splits: cute.FastDivmodDivisorV2
    work_tiles: Int32  # tokens x splits x blocks of heads

    @property
    def tokens(self) -> Int32:
        """Tokens of the launch."""
        return self.request_ids.shape[0]

    def seqlens(self) -> SeqlenInfo:
        """What says how many keys there are."""
        return SeqlenInfo(
            self.request_ids.shape[0],
            self.compressed_rows,
            self.swa_lens.shape[0],
            self.window_rows,
            self.swa_lens,
            self.request_ids,
            self.compressed_lens,
        )


class WorkTile(NamedTuple):
    """Output tile of a CTA, and which split of its keys."""

    token: Int32
    head_block: Int32  # of 64
    split: Int32


# ---- 1 CTA ---------------------------------------------------------------------------------------


class Pipelines1Cta(NamedTuple):
    """The edges of `Plan1Cta.barriers`."""

    q: pipeline.PipelineTmaUmma
    kv: pipeline.PipelineTmaUmma
    s: pipeline.PipelineUmmaAsync
    p: pipeline.PipelineAsyncUmma
    o: pipeline.PipelineUmmaAsync


class Smem1Cta(NamedTuple):
    """Views of shared memory; `k` and `v` are one buffer, `o` is staged over `q`."""

    q: cute.Tensor  # (MMA, 1, MMA_K, 1)
    k: cute.Tensor  # (MMA, 1, MMA_K, stage), keys x chunk_dim
    v: cute.Tensor  # (MMA, 1, MMA_K, stage), chunk_dim x keys
    p: cute.Tensor  # (MMA, 1, MMA_K, stage)
    p_rows: cute.Tensor  # (64, 64, stage)
    o_rows: cute.Tensor  # (64, head_dim, 1)


class Context1Cta(NamedTuple):
    """Context of every role of the 1-CTA kernel."""

    params: KernelParams
    work: WorkTile
    pipelines: Pipelines1Cta
    smem: Smem1Cta
    tmem: TmemAllocator
    info: Any = None  # `paged_context.TileInfo` where keys are gathered


# ---- 2 CTAs --------------------------------------------------------------------------------------


class TileScheduler(NamedTuple):
    """Static persistent schedule: work tiles first, first + step, ... below count of a cluster."""

    first: Int32
    step: Int32
    count: Int32


class Pipelines2Cta(NamedTuple):
    """The edges of `Plan2Cta.barriers`."""

    q: pipeline.PipelineAsyncUmma
    kv: pipeline.PipelineTmaUmma
    s: pipeline.PipelineUmmaAsync
    p: pipeline.PipelineAsyncUmma


class Smem2Cta(NamedTuple):
    """Views of shared memory; `k`, `v` and `kv_rows` are one buffer, `staged` lies over `p` and
    over `exchange`.
    """

    k: cute.Tensor  # (MMA, 1, MMA_K, stage), keys x 256
    v: cute.Tensor  # (MMA, 2, MMA_K, stage), 256 x keys
    p: cute.Tensor  # (MMA, 1, MMA_K, stage)
    kv_rows: cute.Tensor  # (64, 256, stage)
    staged: tuple[cute.Tensor, ...]  # two of (32, 64, warp)
    exchange: cute.Tensor  # (4, lane, unit, warp) fp32
    row_values: cute.Tensor  # (thread, 2) fp32


class Tmem2Cta(NamedTuple):
    """Tensor Memory as the tensor core addresses it."""

    q: cute.Tensor  # (MMA, 1, MMA_K)
    s: cute.Tensor  # (MMA, 1, 1, stage)
    o: cute.Tensor  # (MMA, 1, 2)


class Context2Cta(NamedTuple):
    """Context of every role of the 2-CTA kernel."""

    params: KernelParams
    scheduler: TileScheduler
    cta_rank: Int32  # in the cluster
    pipelines: Pipelines2Cta
    smem: Smem2Cta
    tmem: TmemAllocator
    info: Any = None  # `paged_context.TileInfo` where keys are gathered
