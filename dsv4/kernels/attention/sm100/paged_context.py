"""Parameters of a paged launch on Blackwell, and the ring between gather and softmax."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.experimental.cuda.tensor_map import TensorMap

from dsv4.kernels.attention.key_span import KeySpan
from dsv4.kernels.attention.key_tiles import TILE_INFO_WORDS
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.paged_keys import PagedKeys
from dsv4.kernels.attention.query_norm import query_norm
from dsv4.kernels.attention.sm100.context import WorkTile
from dsv4.kernels.attention.sm100.plan_1cta import KEYS
from dsv4.kernels.attention.sm100.plan_paged import INFO_STAGES
from dsv4.kernels.attention.tile_info import store_tile_info
from dsv4.kernels.kit.mbarrier import Buffer
from dsv4.kernels.kit.plan import BarrierGraph
from dsv4.kernels.kit.tma import gather_steps, make_gather_descriptor


class PagedParams(NamedTuple):
    """Parameters of a launch: what `KernelParams` names alike, and the keys."""

    q: cpasync.TmaInfo | cute.Tensor  # [n_h, head_dim, T]; with 2 CTAs [T, n_h, head_dim]
    o: cpasync.TmaInfo  # [n_h, head_dim, T]
    keys: PagedKeys
    # `gather_steps` of the compressed pool and of the window's; none of FP8 entries.
    steps: tuple[tuple[Int64, Int64], ...]
    q_factor: cute.Tensor  # [T, n_h] fp32, or [0, n_h]: 1; or squares: see `PagedArguments`
    rope: cute.Tensor  # [positions, 64] fp32, or [0, 64]: none
    sink_logits: cute.Tensor
    lse: cute.Tensor
    max_logits: cute.Tensor
    workspace: cute.Tensor
    tokens: Int32
    num_splits: Int32
    by_splits: cute.FastDivmodDivisorV2
    work_tiles: Int32  # tokens x splits x blocks of heads
    rounded: tuple[cute.Tensor, ...]  # codes and their scales, where the output becomes those
    # Addresses of the gather descriptors, in the order of `steps`: they are known in the kernel.
    maps: tuple[Int64, ...] = ()

    @classmethod
    def of(
        cls, arguments: PagedArguments, q, o: cpasync.TmaInfo, head_blocks: int, rounds_rows: bool
    ):
        """Parameters of a launch without the descriptors of the pools; host code.

        Args:
            q, o: as the kernel reads and writes them.
            head_blocks: work tiles of a token's split.
            rounds_rows: whether the output becomes codes.
        """
        names = ("q_factor", "rope", "sink_logits", "lse", "max_logits", "workspace", "num_splits")
        tokens = arguments.q.shape[0]
        has_rows = arguments.window_pool.element_type is BFloat16
        pools = (arguments.compressed_pool, arguments.window_pool)
        return cls(
            q=q,
            o=o,
            keys=arguments.keys(),
            steps=tuple(gather_steps(pool) for pool in pools) if has_rows else (),
            tokens=tokens,
            by_splits=cute.fast_divmod_create_divisor_v2(arguments.num_splits),
            work_tiles=tokens * arguments.num_splits * head_blocks,
            rounded=(arguments.codes, arguments.code_scales) if rounds_rows else (),
            **{name: getattr(arguments, name) for name in names},
        )

    def with_maps(self, maps: tuple[TensorMap, ...]):
        """The parameters with the descriptors of the pools, which are parameters beside them."""
        return self._replace(maps=tuple(Int64(one.get_ptr().toint()) for one in maps))

    def find_keys(self, config: PagedFmhaConfig, work: WorkTile, has_flags: bool) -> KeySpan:
        """Keys of a work tile; the whole warp calls this.

        Args:
            has_flags: whether `BOTH_BRANCHES` is asked for, which takes a look at the lists.
        """
        is_gate = has_flags and config.sink_mode == "swa_gate"
        return self.keys.span(work.token, work.split, self.by_splits, KEYS, is_gate)

    @cute.jit
    def score_scale(
        self, config: cutlass.Constexpr, scale_log2: cutlass.Constexpr, work: WorkTile, head: Int32
    ) -> Float32:
        """Factor from scores of a head to logits in base 2."""
        scale = Float32(scale_log2)
        if work.token < self.q_factor.shape[0] and head < config.num_query_heads:
            norm = query_norm(config)
            if cutlass.const_expr(norm is None):
                scale = self.q_factor[work.token, head] * scale_log2
            else:
                scale = norm.of_thread(self.q_factor, work.token, head) * scale_log2
        return scale


@cute.jit
def gather_maps(arguments: PagedArguments, steps: tuple) -> tuple:
    """Gather descriptors of the pools, in the order of `PagedParams.steps`; host code."""
    fallback = arguments.q.iterator
    return (
        make_gather_descriptor(arguments.compressed_pool, steps[0], fallback),
        make_gather_descriptor(arguments.window_pool, steps[1], fallback),
    )


@dataclass(frozen=True)
class TileInfo:
    """Ring of words about key tiles, in the order in which a CTA's warps gather them.

    Its cursors are numbers of tiles: both sides count them anyway.
    """

    words: cute.Tensor  # (INFO_STAGES * TILE_INFO_WORDS,) in shared memory
    full: cute.Pointer
    empty: cute.Pointer

    @classmethod
    def create(cls, storage, graph: BarrierGraph) -> "TileInfo":
        """The ring of a plan with the edge "info", its mbarriers initialised.

        The caller still makes them visible to the other threads.
        """
        barriers = storage.info_barriers.data_ptr()
        words = storage.tile_info.get_tensor(cute.make_layout(INFO_STAGES * TILE_INFO_WORDS))
        info = cls(words, barriers, barriers + INFO_STAGES)
        info._init(graph)
        return info

    @cute.jit
    def _init(self, graph: cutlass.Constexpr[BarrierGraph]):
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            with cute.arch.elect_one():
                for index, arrivals in graph.initial_counts("info"):
                    cute.arch.mbarrier_init(self.full + index, arrivals)

    def _at(self, count: Int32) -> tuple[Int32, Buffer, Int32]:
        """Stage, mbarriers and parity of a tile."""
        stage = count % INFO_STAGES
        return stage, Buffer(self.full + stage, self.empty + stage), count // INFO_STAGES % 2

    @cute.jit
    def send(self, count: Int32, is_key, is_window, warp, lane, warp_keys: cutlass.Constexpr):
        """Say which of a warp's rows of tile number `count` are keys; all gather warps do so.

        Args:
            is_key: ballots over 32 rows each, of a warp that has all of them, or one over fewer.
        """
        stage, barriers, parity = self._at(count)
        barriers.acquire(parity ^ 1)
        first = stage * TILE_INFO_WORDS
        for i in cutlass.range_constexpr(len(is_key)):
            store_tile_info(self.words, first, is_key[i], is_window, warp + i, lane, warp_keys)
        barriers.commit(lane)

    @cute.jit
    def receive(self, count: Int32, lane) -> tuple[Int32, Int32]:
        """The words of 64 rows of tile number `count`; all softmax warps ask."""
        stage, barriers, parity = self._at(count)
        barriers.wait(parity)
        words = cute.make_rmem_tensor(2, Int32)
        start = self.words.iterator + stage * TILE_INFO_WORDS
        start = cute.make_ptr(Int32, start.toint(), start.memspace, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(start, cute.make_layout(2)), words)
        barriers.release(lane)
        return words[0], words[1]
