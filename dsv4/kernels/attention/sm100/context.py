"""What the roles of the Blackwell attention kernel hand each other while it is traced."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync


class Arguments(NamedTuple):
    """Arguments of the kernel's call, see `FmhaKernel.__call__`."""

    q: cute.Tensor
    compressed_kv: cute.Tensor
    swa_kv: cute.Tensor
    swa_lens: cute.Tensor
    sink_logits: cute.Tensor
    request_ids: cute.Tensor
    o: cute.Tensor
    compressed_lens: cute.Tensor
    lse: cute.Tensor
    workspace: cute.Tensor
    num_splits: Int32
    num_ctas: Int32

    def tables(self) -> dict:
        """What `Operands` takes over as it is."""
        names = ("swa_lens", "sink_logits", "request_ids", "compressed_lens", "lse", "workspace")
        return {
            **{name: getattr(self, name) for name in (*names, "num_splits")},
            "compressed_rows": self.compressed_kv.shape[1],
            "window_rows": self.swa_kv.shape[1],
        }


class Operands(NamedTuple):
    """What a launch works on: tensor maps and small tables."""

    q: cpasync.TmaInfo | cute.Tensor  # [n_h, head_dim, T]; [T, n_h, head_dim] for a pair
    compressed: cpasync.TmaInfo  # [top_k, head_dim, T]
    window: cpasync.TmaInfo  # [W, head_dim, batch]
    o: cpasync.TmaInfo  # [n_h, head_dim, T]
    compressed_rows: Int32  # top_k, W: a map of an empty tensor claims one row
    window_rows: Int32
    swa_lens: cute.Tensor
    sink_logits: cute.Tensor
    request_ids: cute.Tensor
    compressed_lens: cute.Tensor
    lse: cute.Tensor
    workspace: cute.Tensor
    num_splits: Int32
    items: Int32  # tokens x splits x blocks of heads


class Work(NamedTuple):
    """What a CTA computes."""

    token: Int32
    head_block: Int32  # of 64
    split: Int32


class Keys(NamedTuple):
    """What a CTA attends to: tiles [first, last) of the token's compressed tiles, then window
    tiles.
    """

    compressed: Int32  # keys of the token
    window: Int32
    window_first: Int32  # row of its first window key
    compressed_tiles: Int32  # tiles of the token
    first: Int32
    last: Int32


class Pipes(NamedTuple):
    """The edges of `FmhaPlan.pipelines`."""

    q: pipeline.PipelineTmaUmma
    kv: pipeline.PipelineTmaUmma
    s: pipeline.PipelineUmmaAsync
    p: pipeline.PipelineAsyncUmma
    o: pipeline.PipelineUmmaAsync


class Smem(NamedTuple):
    """Views of shared memory; `k` and `v` are one buffer, `o` is staged over `q`."""

    q: cute.Tensor  # (MMA, 1, MMA_K, 1)
    k: cute.Tensor  # (MMA, 1, MMA_K, stage), keys x chunk_dim
    v: cute.Tensor  # (MMA, 1, MMA_K, stage), chunk_dim x keys
    p: cute.Tensor  # (MMA, 1, MMA_K, stage)
    p_rows: cute.Tensor  # (64, 64, stage)
    o_rows: cute.Tensor  # (64, head_dim, 1)


class Items(NamedTuple):
    """Items of work that a pair takes: first, first + step, ... below count."""

    first: Int32
    step: Int32
    count: Int32
    rank: Int32  # of this CTA in its pair


class PairPipes(NamedTuple):
    """The edges of `PairPlan.pipelines`."""

    q: pipeline.PipelineAsyncUmma
    kv: pipeline.PipelineTmaUmma
    s: pipeline.PipelineUmmaAsync
    p: pipeline.PipelineAsyncUmma


class PairSmem(NamedTuple):
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


class PairTmemViews(NamedTuple):
    """Tensor Memory as the tensor core addresses it."""

    q: cute.Tensor  # (MMA, 1, MMA_K)
    s: cute.Tensor  # (MMA, 1, 1, stage)
    o: cute.Tensor  # (MMA, 1, 2)
