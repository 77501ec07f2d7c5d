"""What the roles of the Blackwell attention kernel hand each other while it is traced."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync


class Operands(NamedTuple):
    """What a launch works on: tensor maps and small tables."""

    q: cpasync.TmaInfo  # [n_h, head_dim, T]
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


class Work(NamedTuple):
    """What a CTA computes."""

    token: Int32
    head_block: Int32
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
