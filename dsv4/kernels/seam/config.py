"""Configuration of a seam kernel, and its division of a token among the CTAs of a cluster.

Imports neither cutlass nor torch, so that every layer may use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.arch import KIB

STREAMS = 4  # residual streams of a token: what the kernel is written for
GROUP = 128  # elements that share an FP8 scale: the columns of a warp
LANE_COLUMNS = 4  # of a stream, by lane
WARPS = 8  # that compute, beside the one that mixes
WARP = 32
MAX_RANKS = 16  # CTAs of a cluster
MIX_ROWS = STREAMS + STREAMS * STREAMS  # rows of post and comb
SQUARES_ROW = 24  # of the sums over a group's columns: behind the rows of fn
PARTIAL_ROWS = 32
TILE = 8  # tokens that a CTA of the first of two launches takes at a time
TILE_CTAS = 2  # of that launch that share an SM
MAX_PARTS = 512  # of the tokens, by which the CTAs of that launch divide them
COUNTER_WORDS = 8  # of a part, where the two are one
MAX_JOINED_GROUPS = 32  # of columns for which that one is faster: Flash's
SMEM_LIMIT = 226 * KIB  # of the buffers of an SM's CTAs; mbarriers take the rest
PASS_SIZES = (1, 2, 4)
MANY_PASS = 2  # tokens of a pass where one pass of each cluster does not hold all
MAX_TOP_K = 31  # a warp looks at the experts of a token
# Tokens up to which clusters take them, in one launch: in a layer, where a cluster waits for places
# on 16 SMs at once, two launches of parts are faster from there on. Parts take one launch for so
# many tokens of rows no wider than Flash's. Measured on an H200: docs/design/seams.md.
FEW_TOKENS = 8
JOINED_TOKENS = range(33, 257)
MIN_EPS = 1e-18
MAX_ITERS, KERNEL_ITERS = 1000, 64  # of Sinkhorn's: of any, and of a kernel, which unrolls them


@dataclass(frozen=True)
class SeamConfig:
    """Identity of a compiled `mhc_seam`.

    Attributes:
        dim: elements of a stream; kernels take multiples of 128.
        num_streams: residual streams of a token; kernels take 4.
        is_head: the model's head: 1 scale, no post and no comb.
        expands: whether the output of a sublayer is written to the streams first.
        sinkhorn_iters: row and column normalisations of comb, at least 1.
        eps: added to pre and to every denominator of comb; at least 1e-18.
        norm_eps: added to mean squares, of all streams and of the normalised row; likewise.
        top_k: of a sublayer whose output comes as rows of its experts, still to be added: k of them
            and the shared one's; 0: it is one row.
    """

    dim: int
    num_streams: int
    is_head: bool
    expands: bool
    sinkhorn_iters: int
    eps: float
    norm_eps: float
    top_k: int = 0

    def __post_init__(self) -> None:
        for name in ("dim", "num_streams", "sinkhorn_iters"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.sinkhorn_iters > MAX_ITERS:
            raise ValueError(
                f"sinkhorn_iters must be at most {MAX_ITERS}, got {self.sinkhorn_iters}"
            )
        for name in ("eps", "norm_eps"):
            value = getattr(self, name)
            if not value >= MIN_EPS:
                raise ValueError(f"{name} must be at least {MIN_EPS}, got {value}")
        if not 0 <= self.top_k <= MAX_TOP_K * self.expands:
            most = f"at most {MAX_TOP_K}" if self.expands else "0 without a sublayer before"
            raise ValueError(f"top_k must be {most}, got {self.top_k}")

    @property
    def rows(self) -> int:
        """Rows of fn: pre, then post and comb unless of the head."""
        return self.num_streams if self.is_head else self.num_streams * (2 + self.num_streams)

    @property
    def passes_left(self) -> int:
        """Passes of comb's iteration that are left to the seam that needs it."""
        return passes_left(self.sinkhorn_iters)

    @property
    def scales(self) -> int:
        """Elements of scale: one each for pre, post and comb."""
        return 1 if self.is_head else 3


def passes_left(sinkhorn_iters: int) -> int:
    """Passes over rows and columns, of so many in all, that a seam leaves to the next one: for half
    of them there is time beside the mixture, for the others before the next one's wait."""
    return sinkhorn_iters // 2


@dataclass(frozen=True)
class SeamTiling:
    """Division of a token among the CTAs of a cluster.

    A group of 128 columns of all streams belongs to a warp: rank r has the groups r, r + ranks, ...
    Where a rank has fewer groups than warps, several sets of warps share its groups: they take
    different tokens while streams are written, and different rows of fn while products are summed.

    Attributes:
        groups: of 128 columns.
        rows: of fn.
    """

    groups: int
    rows: int

    @property
    def ranks(self) -> int:
        """CTAs of the cluster: a power of two; at least two, since compute-sanitizer refuses stores
        between CTAs in a cluster of one."""
        return max(2, min(MAX_RANKS, 1 << (self.groups - 1).bit_length()))

    @property
    def rank_groups(self) -> int:
        """Groups of a rank, the last of which only some ranks have; a power of two."""
        found = -(-self.groups // self.ranks)
        return 1 << (found - 1).bit_length()

    @property
    def is_ragged(self) -> bool:
        """Whether some ranks have fewer groups."""
        return self.rank_groups * self.ranks != self.groups

    @property
    def sets(self) -> int:
        """Sets of warps that share the groups of a rank."""
        return WARPS // self.rank_groups

    @property
    def set_rows(self) -> int:
        """Rows of fn of a set, the last of which may have fewer."""
        return -(-self.rows // self.sets)

    @property
    def columns(self) -> int:
        """Columns of a stream that a rank holds."""
        return self.rank_groups * GROUP

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that share an SM: two hide each other's exchanges."""
        return 2 if 2 * self.smem_bytes(PASS_SIZES[-1]) <= SMEM_LIMIT else 1

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        """Tokens that a cluster takes at a time: what the kernel has code for, ascending."""
        limit = SMEM_LIMIT // self.ctas_per_sm
        return tuple(n for n in PASS_SIZES if self.smem_bytes(n) <= limit)

    def smem_bytes(self, tokens: int) -> int:
        """Bytes of the buffers that a pass of so many tokens needs."""
        fn = self.rows * STREAMS * self.columns * 4
        streams = tokens * STREAMS * self.columns * 2
        partials = self.rank_groups * tokens * 32 * 4
        exchange = self.ranks * (tokens * 8 + self.owned(tokens) * MIX_ROWS + tokens) * 4
        small = tokens * (self.rank_groups + 2 * STREAMS * STREAMS) * 4
        return fn + streams + partials + exchange + small

    def owned(self, tokens: int) -> int:
        """Tokens of a pass whose post and comb a rank computes, at most."""
        return -(-tokens // self.ranks)


def tiling_of(config: SeamConfig) -> SeamTiling:
    """The tiling of a configuration that kernels take."""
    return SeamTiling(config.dim // GROUP, config.rows)


def has_kernel(config: SeamConfig) -> bool:
    """Whether the kernel takes a configuration: streams of 4, rows of whole groups that fit."""
    if config.num_streams != STREAMS or config.dim % GROUP or config.sinkhorn_iters > KERNEL_ITERS:
        return False
    tiling = tiling_of(config)
    return tiling.rank_groups <= WARPS and bool(tiling.pass_sizes)


def choose_parts(tiling: SeamTiling, tokens: int, num_sms: int) -> tuple[int, int]:
    """Parts of the tokens that CTAs take, 0 where clusters do; whether in one launch."""
    if tokens <= FEW_TOKENS:
        return 0, 0
    parts = min(-(-tokens // TILE), max(1, num_sms * TILE_CTAS // tiling.groups), MAX_PARTS)
    return parts, int(can_join(tiling) and tokens in JOINED_TOKENS)


def can_join(tiling: SeamTiling) -> bool:
    """Whether there is a kernel that multiplies and collapses in one launch."""
    return tiling.groups <= MAX_JOINED_GROUPS


def choose_pass(tiling: SeamTiling, tokens: int, num_sms: int) -> tuple[int, int]:
    """Clusters of a launch and tokens of a pass.

    By itself a launch is fastest with a cluster for each token, and Pro has one while all find a
    place. In a layer of Flash, where two CTAs share an SM, each cluster more waits for places on 16
    SMs at once: one takes all tokens that a pass holds, of more each takes two. Measured on an
    H200: docs/design/seams.md.
    """
    sizes = tiling.pass_sizes
    places = num_sms // tiling.ranks
    if tiling.ranks == MAX_RANKS:
        # One of an H200's groups of SMs has fewer than 16; an eighth cluster would come later.
        places -= 1
    clusters = max(1, places * tiling.ctas_per_sm)
    together = 1 if tiling.ctas_per_sm > 1 else clusters
    size = min((n for n in sizes if n * together >= tokens), default=min(MANY_PASS, sizes[-1]))
    return min(clusters, max(1, -(-tokens // size))), size
