"""Configuration of a mixture-of-experts layer: router, routed experts and the shared one.

Imports neither cutlass nor torch, so that every layer may use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.kernels.moe.config import (
    BF16_DTYPES,
    FP4_GROUP,
    K_BLOCK,
    SCALE_FORMS,
    ExpertsConfig,
    check_row_packed,
)
from dsv4.kernels.moe.layout import PANEL_ROWS
from dsv4.kernels.moe.routing import RoutingConfig, why_no_kernel
from dsv4.quoting import quoted

NVFP4_GROUP = 16  # e2m1 weights that share an e4m3 scale
FLOAT_DTYPES = ("bfloat16", "float32")
EXPERT_DTYPES = (*FLOAT_DTYPES, "fp8", "fp4", "nvfp4")
SHARED_DTYPES = (*FLOAT_DTYPES, "fp8")
BLOCK_SCALE_DTYPES = ("float8_e8m0fnu", "float32")
# Routed experts beside a shared one that kernels take.
KERNEL_DTYPES = (
    ("fp4", "fp8"), ("fp8", "fp8"), ("nvfp4", "fp8"), ("bfloat16", "fp8"), ("bfloat16", "bfloat16"),
)  # fmt: skip
FORMS = ("released", *SCALE_FORMS)
WEIGHT_DTYPES = {"fp8": "float8_e4m3fn", "fp4": "int8", "nvfp4": "uint8"}


@dataclass(frozen=True)
class MoeConfig:
    """Identity of a layer.

    Attributes:
        hidden, inner, experts, top_k: D, I, E and k.
        expert_dtype: of the routed experts: "bfloat16", "float32", "fp8" (e4m3 in blocks), "fp4"
            (e2m1 with an E8M0 scale per 32), "nvfp4" (e2m1 with an e4m3 scale per 16 and one fp32
            scale per matrix; multiplied with activations of this format where their fp32 scales are
            given, else with such that are not rounded).
        shared_dtype: of the shared expert: "bfloat16", "float32" or "fp8".
        gate_dtype: of the router's weight: "bfloat16" or "float32".
        scale_dtype: of FP8 blocks, "float8_e8m0fnu" or "float32".
        block_rows, block_columns: of an FP8 block.
        form: of quantised weights: "released", as checkpoints store them; or prepared for kernels,
            with FP4 scales "packed", "row_packed" or "raw" (Hopper), or "tiled" (Blackwell).
        is_hashed: whether a table gives a token's experts; else its best scores do.
        scaling: that the weights of a token's experts add up to.
        limit: gate is at most that, up within plus and minus that.
        out_dtype: of the result.
        combines: whether a token's rows are added; else they stay in the scratch, for a reader
            that adds them.
    """

    hidden: int
    inner: int
    experts: int
    top_k: int
    expert_dtype: str = "fp4"
    shared_dtype: str = "fp8"
    gate_dtype: str = "bfloat16"
    scale_dtype: str = "float8_e8m0fnu"
    block_rows: int = K_BLOCK
    block_columns: int = K_BLOCK
    form: str = "released"
    is_hashed: bool = False
    scaling: float = 1.0
    limit: float = 10.0
    out_dtype: str = "bfloat16"
    combines: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden", "inner", "experts", "top_k", "block_rows", "block_columns"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k must be at most {self.experts} experts, got {self.top_k}")
        if not self.limit > 0:
            raise ValueError(f"limit must be positive, got {self.limit}")
        for name, allowed in (
            ("expert_dtype", EXPERT_DTYPES),
            ("shared_dtype", SHARED_DTYPES),
            ("gate_dtype", FLOAT_DTYPES),
            ("scale_dtype", BLOCK_SCALE_DTYPES),
            ("form", FORMS),
            ("out_dtype", FLOAT_DTYPES),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {quoted(value)}")
        self._check_groups()

    def _check_groups(self) -> None:
        """Refuse widths that quantised activations or weights, or prepared ones, do not fill in
        whole groups."""
        quantised = [d for d in (self.expert_dtype, self.shared_dtype) if d in ("fp4", "fp8")]
        group, what = 1, self.expert_dtype
        if quantised:
            group, what = K_BLOCK, quantised[0]
        elif self.form != "released" and {self.expert_dtype, self.shared_dtype} & set(BF16_DTYPES):
            group, what = K_BLOCK, "prepared"
        elif self.expert_dtype == "nvfp4":
            group = NVFP4_GROUP
        for name in ("hidden", "inner"):
            value = getattr(self, name)
            if value % group:
                raise ValueError(
                    f"{name} must be a multiple of {group} for {what} experts, got {value}"
                )
            if self.expert_dtype == "fp4" and self.form == "row_packed":
                check_row_packed(name, value)

    @property
    def has_router_bias(self) -> bool:
        """Whether a bias takes part in the choice of experts."""
        return not self.is_hashed

    @property
    def why_no_kernel(self) -> str:
        """What the kernels cannot take, whatever form the weights have; empty if nothing."""
        if (self.expert_dtype, self.shared_dtype) not in KERNEL_DTYPES:
            return f"experts in {self.expert_dtype} beside a shared one in {self.shared_dtype}"
        if self.gate_dtype != "bfloat16":
            return f"gate_dtype {self.gate_dtype}"
        if (self.block_rows, self.block_columns) != (K_BLOCK, K_BLOCK):
            return f"blocks of {self.block_rows} x {self.block_columns}"
        if self.inner % (4 * PANEL_ROWS) or self.hidden % (4 * PANEL_ROWS):
            return f"widths {self.hidden} and {self.inner}"
        return why_no_kernel(self.hidden, self.experts, self.top_k)

    @property
    def rounds_to_nvfp4(self) -> bool:
        """Whether kernels multiply activations in NVFP4: those of Blackwell."""
        return self.expert_dtype == "nvfp4" and self.form == "tiled"

    @property
    def routing(self) -> RoutingConfig:
        """What the router's kernels are compiled for."""
        return RoutingConfig(
            self.hidden, self.experts, self.top_k, self.is_hashed, self.scaling,
            quantizes=self.shared_dtype == "fp8", packs=self.rounds_to_nvfp4,
        )  # fmt: skip

    @property
    def kernels(self) -> ExpertsConfig:
        """What the experts' kernels are compiled for."""
        has_forms = self.expert_dtype == "fp4" or self.form == "tiled"
        form = self.form if has_forms else "packed"
        return ExpertsConfig(
            self.hidden, self.inner, self.top_k, self.expert_dtype, form, self.scale_dtype,
            self.scale_dtype, self.limit, self.out_dtype, self.shared_dtype,
        )  # fmt: skip

    def scale_shape(self, rows: int, columns: int, dtype: str) -> tuple[int, int]:
        """Scales of a weight [rows, columns] that has some; of those of bf16 weights, which have no
        rows, the last dimensions."""
        if dtype == "fp8":
            return -(-rows // self.block_rows), -(-columns // self.block_columns)
        if dtype in ("fp4", "nvfp4"):
            return rows, columns // (FP4_GROUP if dtype == "fp4" else NVFP4_GROUP)
        # Kernels, which take them, have no constants of 0.
        return (1, 1) if dtype == "bfloat16" else (0, 0)
