"""Configuration of `sample_tokens`, its arguments, and the division of a row: B requests of C
tokens each, V logits of a token.

Imports neither cutlass nor torch, so that every layer may use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from dsv4.kernels.kit.args import In, OptIn, Out
from dsv4.quoting import quoted

MAX_VOCAB = 1 << 30
VECTOR = 4  # logits of a load, and words of a block of noise
WARP = 32
THREADS = 512
CLUSTER, MAX_CLUSTER = 8, 16  # CTAs of a row: where they suffice, at most
HELD = 8  # vectors of a thread, at most: more registers would leave one CTA on an SM


@dataclass(frozen=True)
class SampleTokensConfig:
    """Identity of a compiled `sample_tokens`.

    Attributes:
        vocab_size: V; kernels take multiples of 4 up to 262,144.
        truncates: whether rows may have a top_k, top_p or min_p.
    """

    vocab_size: int
    truncates: bool = False

    def __post_init__(self) -> None:
        size = self.vocab_size
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise TypeError(f"vocab_size: got {quoted(size)}, needs an integer")
        if not 1 <= size <= MAX_VOCAB:
            raise ValueError(f"vocab_size: got {quoted(size)}, needs 1 to {MAX_VOCAB}")
        if not isinstance(self.truncates, bool):
            raise TypeError(f"truncates: got {quoted(self.truncates)}, needs a bool")


@dataclass(frozen=True)
class RowTiling:
    """Division of a row of logits: CTAs have neighbouring runs of it, threads every 512th vector.

    Attributes:
        vectors: of the row, of 4 logits.
    """

    vectors: int

    @property
    def ranks(self) -> int:
        """CTAs of the cluster that has a row: a power of two."""
        needed = -(-self.vectors // THREADS)
        if needed > CLUSTER * HELD:
            return MAX_CLUSTER
        return min(CLUSTER, 1 << (needed - 1).bit_length())

    @property
    def share(self) -> int:
        """Vectors of a CTA; the last ones may have fewer, or none."""
        return -(-self.vectors // self.ranks)

    @property
    def held(self) -> int:
        """Vectors of a thread."""
        return -(-self.share // THREADS)


def tiling_of(config: SampleTokensConfig) -> RowTiling:
    """Division of a row of the configuration."""
    return RowTiling(-(-config.vocab_size // VECTOR))


def has_kernel(config: SampleTokensConfig) -> bool:
    """Whether kernels take the configuration."""
    return config.vocab_size % VECTOR == 0 and tiling_of(config).held <= HELD


ARGS = (
    In("logits", "B C V", "float32", align="row_bytes"),
    In("positions", "B C", "int64"),
    In("temperature", "B", "float32", differentiable=False),
    In("seed", "B", "int64"),
    Out("tokens", "B C", "int64"),
    OptIn("top_p", "B", "float32", differentiable=False),
    OptIn("top_k", "B", "int64"),
    OptIn("min_p", "B", "float32", differentiable=False),
)


def values(config: SampleTokensConfig) -> dict[str, int | str]:
    """The sizes that a kernel is compiled for."""
    return {"V": config.vocab_size, "row_bytes": 4 if config.vocab_size % VECTOR else 16}
