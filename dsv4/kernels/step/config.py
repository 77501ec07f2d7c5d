"""Configuration of `step_indices`, and its arguments: B requests of C tokens, W blocks of each.

Imports neither cutlass nor torch, so that every layer may use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from dsv4.kernels.kit.args import In, OptOut, Out, Scalar
from dsv4.quoting import quoted

KINDS = 2  # ratios of a model, at most


@dataclass(frozen=True)
class StepIndicesConfig:
    """Identity of a compiled `step_indices`.

    Attributes:
        ring: keys of a request's sliding window in its page, which kernels take at run time.
        block: positions of a cache block, a multiple of both ratios.
        ratio_0, ratio_1: positions per compressed entry of the layers that have some; 0: there are
            no such layers.
    """

    ring: int
    block: int
    ratio_0: int = 0
    ratio_1: int = 0

    def __post_init__(self) -> None:
        for name, least in (("ring", 1), ("block", 1), ("ratio_0", 0), ("ratio_1", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{name}: got {quoted(value)}, needs an integer")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {quoted(value)}")
        for ratio in filter(None, self.ratios):
            if self.block % ratio:
                raise ValueError(
                    f"block: got {quoted(self.block)}, needs a multiple of ratio {quoted(ratio)}"
                )

    @property
    def ratios(self) -> tuple[int, int]:
        """Both, 0 for none."""
        return self.ratio_0, self.ratio_1


ARGS = (
    In("slots", "B", "int64"),
    In("starts", "B", "int64"),
    In("lens", "B", "int64"),
    In("block_table", "B W", "int64"),
    Out("requests", "three B", "int32"),
    Out("pages", "B W", "int32"),
    Out("positions", "B C", "int32"),
    Out("request_ids", "B C", "int32"),
    Out("window_slots", "B C", "int32"),
    Out("live_tokens", "one", "int32"),
    *(
        arg
        for kind in range(KINDS)
        for arg in (
            OptOut(f"completed_{kind}", f"B K_{kind}", "int32"),
            OptOut(f"visible_{kind}", "B C", "int32"),
        )
    ),
    Scalar("num_ctas"),
    Scalar("ring"),
)


def values(config: StepIndicesConfig) -> dict[str, int | str]:
    """The sizes that a kernel is compiled for."""
    return {"three": 3, "one": 1}
