"""Kernels of `index_topk`: one launch, a cluster a token; or scores, then the choice."""

from __future__ import annotations

from collections.abc import Callable

from cutlass import Int32, cute

from dsv4.kernels.indexer.config import IndexTopkConfig, has_kernel
from dsv4.kernels.indexer.context import Operands, counts_of
from dsv4.kernels.indexer.one_launch import OneLaunch
from dsv4.kernels.indexer.plan import clusters_of
from dsv4.kernels.indexer.scores import Scores
from dsv4.kernels.indexer.select import Select
from dsv4.kernels.indexer.select_fp32 import SelectFp32


class IndexTopk:
    """Kernels of one configuration.

    Args:
        products: of an architecture: see `TileScores`.
        has_tmem: see `ScoresPlan`.
    """

    def __init__(self, config: IndexTopkConfig, products: Callable, has_tmem: bool):
        assert has_kernel(config), config
        self.has_codes = config.has_codes
        self.scores = Scores(config, products, has_tmem)
        one_launch, two = clusters_of(config.rank)
        select = Select if config.rank == "bf16" else SelectFp32
        self.select = {ctas: select(config, ctas) for ctas in two}
        self.one_launch = {ctas: OneLaunch(config, ctas, products, has_tmem) for ctas in one_launch}

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # [T, h d] bf16; or [T, h d / 2], pairs of codes
        weights: cute.Tensor,  # [T, h] bf16
        rope: cute.Tensor,  # [R, rope_dim] fp32
        positions: cute.Tensor,  # [T] int32
        lens: cute.Tensor,  # [T] int32
        request_ids: cute.Tensor,  # [T] int32
        block_table: cute.Tensor,  # [B, W] int32
        keys: cute.Tensor,  # [pages, P, row] uint8
        indices: cute.Tensor,  # [T, k] int32, written
        scores: cute.Tensor,  # [T, N] bf16 or fp32, written
        stream,
        *,
        q_scale: cute.Tensor,  # [T, h] fp32 of codes, or [0, h]
        workspace: cute.Tensor,
        num_ctas: Int32,  # of the scores' launch; 0: there is one launch
        cluster: Int32,  # CTAs that choose for a token: of ONE_LAUNCH_CLUSTERS, or of CLUSTERS
    ):
        """Launch what the plan has chosen."""
        counts = counts_of(workspace, Int32(q.shape[0]))
        operands = Operands(
            q, weights, rope, positions, lens, request_ids, block_table, keys, indices, scores,
            counts, (q_scale,) if self.has_codes else (),
        )  # fmt: skip
        if num_ctas == 0:
            for ctas, one_launch in self.one_launch.items():
                if cluster == ctas:
                    one_launch.launch(operands, stream)
        else:
            self.scores.launch(operands, stream, num_ctas)
            for ctas, select in self.select.items():
                if cluster == ctas:
                    select.launch(operands, stream)
