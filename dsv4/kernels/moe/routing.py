"""Division of the routing's work: order of the gate's sums, tiles, bounds, and the lists it leaves.

Plain Python; imports neither cutlass nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PART = 128  # elements of K in a chain of tensor-core sums; also those that share an FP8 scale
SLICE_PARTS = 4  # parts of a slice, one a warp
SLICE = PART * SLICE_PARTS
EXPERT_TILE = 32  # experts of a CTA of the gate
TOKEN_TILE = 8  # columns of a tensor-core product
MOST_TILES = 8  # token tiles of a CTA of the gate
GATE_THREADS = 32 * SLICE_PARTS
GATE_CTAS = 264  # of the gate that a GPU holds at a time
# Most tokens whose router and the shared expert's first product share a launch: in CTAs of their
# own, and, where codes of the tokens are given, as warps of the same CTAs.
ROUTER_TOKENS, MOST_ROUTED = 2 * TOKEN_TILE, 256
ONE_SPLIT_TOKENS = 512  # above, a CTA adds all slices itself: no partial sums in memory
FEW_TOKENS = 1024  # above, the gate is that of many tokens
SELECT_WARPS = 16  # tokens of a CTA of the selection by itself
MOST_RUNS = 128  # CTAs of the selection of many tokens
VECTOR = 4  # neighbouring experts of a lane
MAX_TOP_K = 7
MAX_EXPERTS = 1024
MAX_TOKENS = 1 << 15  # of a launch: offsets of rows stay below 2^31 elements
# Of an entry of `groups`: expert, first position, rows, and how many tiles of h are there.
GROUP_WORDS = 4
ARRIVAL_WORDS = 2  # CTAs of the selection that are over, tiles of the products that are taken
COUNTER_WORDS = 4  # of the workspace: CTAs that have arrived, of a few kinds


@dataclass(frozen=True)
class RoutingConfig:
    """Configuration that the routing kernels are compiled for.

    Attributes:
        hidden: elements of a token, D.
        experts: routed experts, E.
        top_k: experts of a token, k.
        is_hashed: whether a table gives the experts by token id; else the best scores do.
        scaling: that the weights of a token add up to.
        quantizes: whether the gate also writes e4m3 codes and E8M0 scales of x.
        packs: whether it also writes NVFP4 codes and e4m3 scales.
    """

    hidden: int
    experts: int
    top_k: int
    is_hashed: bool
    scaling: float
    quantizes: bool = True
    packs: bool = False

    def __post_init__(self) -> None:
        reason = why_no_kernel(self.hidden, self.experts, self.top_k)
        if reason:
            raise ValueError(reason)

    @property
    def slices(self) -> int:
        """Slices of K."""
        return self.hidden // SLICE

    @property
    def lane_vectors(self) -> int:
        """Vectors of experts that a lane of the selection holds."""
        return -(-self.experts // (32 * VECTOR))


def why_no_kernel(hidden: int, experts: int, top_k: int) -> str:
    """What the kernels cannot take of these sizes; an empty string if nothing."""
    if hidden < SLICE or hidden % SLICE:
        return f"hidden must be a positive multiple of {SLICE}, got {hidden}"
    if not EXPERT_TILE <= experts <= MAX_EXPERTS or experts % EXPERT_TILE:
        return f"experts must be a multiple of {EXPERT_TILE} up to {MAX_EXPERTS}, got {experts}"
    if not 1 <= top_k <= MAX_TOP_K:
        return f"top_k must be 1 to {MAX_TOP_K}, got {top_k}"
    return ""


def gate_tiling(config: RoutingConfig, tokens: int) -> tuple[int, int]:
    """Partial sums of a logit in memory, and token tiles of a CTA, for so many tokens; no tiles are
    those of the gate of many tokens.

    No bit of a result depends on either.
    """
    if tokens > FEW_TOKENS:
        return 1, 0
    if tokens > ONE_SPLIT_TOKENS:
        return 1, MOST_TILES
    columns = config.experts // EXPERT_TILE * config.slices
    tiles = 1
    while tiles < MOST_TILES and columns * -(-tokens // (TOKEN_TILE * tiles)) > GATE_CTAS:
        tiles *= 2
    return config.slices, tiles


def run_rounds(tokens: Any, runs: Any) -> Any:
    """Tokens of each warp of the selection of so many: as few as keep to so many runs."""
    return (tokens + SELECT_WARPS * runs - 1) // (SELECT_WARPS * runs)


def most_groups(experts: int, pairs: int, group_tokens: int) -> int:
    """Entries that `groups` may have: each expert's last one may be ragged."""
    return min(pairs, experts + pairs // group_tokens)
