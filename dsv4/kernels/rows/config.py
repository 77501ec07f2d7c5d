"""Configuration of a row kernel, and the division of its rows among threads.

Imports neither cutlass nor torch, so that every layer may use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.arch import ARCHS, KIB
from dsv4.quoting import quoted

GROUP = 128  # elements that share a scale
VECTOR = 8  # bf16 elements of a 16-byte load
WARP = 32
MAX_DIM = 16384
MIN_EPS = 1e-18
# Of the chosen tilings: lanes of a group, warps of a row at most, of a CTA where rows are short,
# and of an SM, whose threads then have 64 registers each.
TEAM, MOST_ROW_WARPS, CTA_WARPS, SM_WARPS = 8, 16, 8, 32
WEIGHT_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class RmsNormFp8Config:
    """Identity of a compiled `rms_norm_fp8`.

    Attributes:
        dim: elements of a row, a multiple of 128 up to 16,384.
        eps: added to the mean square; at least 1e-18, beside which a mean square that fp32 holds
            with fewer bits is nothing.
        weight_dtype: "float32", "bfloat16", or None without a weight.
    """

    dim: int
    eps: float
    weight_dtype: str | None = "float32"

    def __post_init__(self) -> None:
        if self.dim % GROUP or not GROUP <= self.dim <= MAX_DIM:
            raise ValueError(f"dim must be a multiple of {GROUP} up to {MAX_DIM}, got {self.dim}")
        if not MIN_EPS <= self.eps < float("inf"):
            raise ValueError(f"eps must be at least {MIN_EPS}, got {self.eps}")
        if self.weight_dtype not in (*WEIGHT_DTYPES, None):
            got = quoted(self.weight_dtype)
            raise ValueError(f"weight_dtype must be one of {WEIGHT_DTYPES} or None, got {got}")

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.dim // GROUP


@dataclass(frozen=True)
class RowTiling:
    """Division of rows among the threads of a CTA. No bit of a result depends on it.

    A team of `team` neighbouring lanes holds a group of 128 elements, in 16-byte vectors that the
    lanes take in turns; the teams of a row take its groups in turns.

    Attributes:
        groups: groups of a row.
        row_warps: warps that share a row.
        rows: rows that a CTA works on at a time.
        team: lanes that share a group: 4, 8 or 16.
        stages: rows under way or at work in shared memory, per row that a CTA works on.
        ctas_per_sm: CTAs that an SM holds, which bounds their registers.
        holds_weight: whether the weight stays in registers, or is loaded for each row.
    """

    groups: int
    row_warps: int
    rows: int
    team: int = 8
    stages: int = 3
    ctas_per_sm: int = 1
    holds_weight: bool = True

    def __post_init__(self) -> None:
        if self.team not in (4, 8, 16):
            raise ValueError(f"team must be 4, 8 or 16, got {self.team}")
        if not 1 <= self.threads <= 1024:
            raise ValueError(f"a CTA has 1 to 1024 threads, got {self.threads}")

    @property
    def row_threads(self) -> int:
        return self.row_warps * WARP

    @property
    def threads(self) -> int:
        return self.rows * self.row_threads

    @property
    def teams(self) -> int:
        """Teams of a row."""
        return self.row_threads // self.team

    @property
    def rounds(self) -> int:
        """Groups that a team takes, the last of which may not exist."""
        return -(-self.groups // self.teams)

    @property
    def is_ragged(self) -> bool:
        """Whether some teams have no group in the last round."""
        return self.groups % self.teams != 0

    @property
    def vectors(self) -> int:
        """Vectors of a group that a lane holds."""
        return GROUP // VECTOR // self.team

    @property
    def elements(self) -> int:
        """Elements of a row that a thread holds."""
        return self.rounds * self.vectors * VECTOR

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: rows, and two sets of group sums."""
        return 2 * self.elements * self.threads * self.stages + 2 * 4 * self.rows * self.groups

    @property
    def carveout(self) -> int:
        """Percent of an SM's memory that its CTAs need as shared memory; the rest is L1."""
        # The driver keeps 1 KiB of every CTA for itself.
        needed = self.ctas_per_sm * (self.smem_bytes + KIB)
        return min(100, -(-100 * needed // min(arch.smem_per_sm for arch in ARCHS.values())))

    @property
    def sums(self) -> int:
        """Group sums, padded to the power of two that their tree needs."""
        return 1 << (self.groups - 1).bit_length()


def choose_tiling(dim: int) -> RowTiling:
    """The tiling of rows of `dim` elements.

    Measured on an H200 at 4,096 and 7,168 elements, T = 8,192: a thread with 16 elements of a row
    beats those with 8 and 32, and one more row on its way beats none and two.
    """
    groups = dim // GROUP
    teams = WARP // TEAM  # of a warp
    rounds = 1 if groups <= MOST_ROW_WARPS * teams else 2
    warps = -(-groups // (teams * rounds))
    rows = max(1, CTA_WARPS // warps)
    return RowTiling(
        groups,
        warps,
        rows,
        team=TEAM,
        stages=2,
        ctas_per_sm=SM_WARPS // (warps * rows),
        # Where the last round is ragged, its addresses take the registers.
        holds_weight=rounds == 1 and groups % (teams * warps) == 0,
    )
