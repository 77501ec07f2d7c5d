"""Configuration and argument table of `dshb_to_bhsd`: the dtype."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.kernels.kit.args import In, Out
from dsv4.quoting import quoted

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class RelayoutConfig:
    """Identity of a `dshb_to_bhsd` runner.

    Attributes:
        dtype: of the elements.
    """

    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, got {quoted(self.dtype)}")


ARGS = (In("x", "d s h b", "dtype"), Out("y", "b h s d", "dtype", public="out"))


def values(config: RelayoutConfig) -> dict[str, str]:
    """The dtype that a kernel is compiled for."""
    return {"dtype": config.dtype}
