"""Configuration of quantised attention: number formats, groups of a scale, smoothing, masks.

Imports neither cutlass nor torch, so that every layer may use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.kernels.lowp.groups import (
    FP4_BLOCK,
    GEOMETRIES,
    Geometry,
    Groups,
    key_groups,
    query_groups,
)
from dsv4.quoting import quoted

HEAD_DIMS = (64, 128, 256)  # channels of codes, which zeros fill
LOG2E = 1.44269504  # as SageAttention rounds it
# log2 of the largest P, by format: a row's largest score is raised by it. 448 * 6 is the largest
# value of an FP4 block.
P_OFFSET = {"fp8": 8.807, "fp16": 0.0, "nvfp4": 11.392317}
SMOOTH_Q_ROWS = 128  # queries that share a mean
VECTOR_BYTES = 16  # of a load
FP16_FLUSH_KEYS = 64  # P V of so many keys stays below fp16's largest number

DTYPES = ("bfloat16", "float16", "float32")
# Granularities by the format of Q and K, the default first.
GRANULARITIES = {
    "int8": ("per_thread", "per_warp", "per_block"),
    "fp8": ("per_head", "per_row", "per_64"),
    "nvfp4": ("per_16",),
}
MASKS = ("none", "bool", "float")
# Accumulation of P V by the format of V, the default first.
ACCUMULATORS = {
    "fp8": ("fp32+fp32", "fp32+fp16", "fp32"),
    "fp16": ("fp32", "fp16+fp32", "fp16"),
    "nvfp4": ("fp32",),
}
# Those that kernels have, by architecture. Blackwell's tensor cores sum in fp32: there two levels
# are one.
KERNEL_ACCUMULATORS = {
    "sm_90a": {"fp8": ("fp32+fp32", "fp32+fp16", "fp32"), "fp16": ("fp32", "fp16+fp32", "fp16")},
    "sm_100a": {"fp8": ("fp32+fp32", "fp32"), "fp16": ("fp32",), "nvfp4": ("fp32",)},
}
# Most channels that they have, by the format of V, in the order of `BOTH`.
KERNEL_HEAD_DIMS = {
    "sm_90a": {"fp8": (256, 256), "fp16": (128, 256)},
    "sm_100a": {"fp8": (128, 128), "fp16": (128, 128), "nvfp4": (128,)},
}
BOTH = ("sm90", "sm89")
# The same by the format of Q and K; no official function has FP4 in tiles of 64 keys.
KERNEL_GEOMETRIES = {
    "sm_90a": {"int8": BOTH, "fp8": BOTH},
    "sm_100a": {"int8": BOTH, "fp8": BOTH, "nvfp4": ("sm90",)},
}
# Formats of queries and keys that an architecture's tensor cores do not multiply.
ABSENT_PRODUCTS = {"sm_90a": ("nvfp4",), "sm_103a": ("int8",)}
# Accumulation beside which the mean of V can be added again at the end.
SMOOTH_V_ACCUMULATOR = {"fp8": "fp32", "fp16": "fp16"}
# Whose rounding: SageAttention's Triton quantisers or its CUDA ones.
QUANTIZERS = {
    "per_thread": ("triton",),
    "per_warp": ("cuda",),
    "per_block": ("triton", "cuda"),
}
CAUSAL = ("none", "top_left", "bottom_right")
KM_SCOPES = ("sequence", "packed")


@dataclass(frozen=True)
class QuantizeKvConfig:
    """Identity of `quantize_kv`: all that codes, scales and means of keys and values depend on.

    Attributes:
        head_dim: channels of a head, up to 256; codes have 64, 128 or 256, zeros fill them.
        dtype: of keys and values: "bfloat16", "float16", "float32".
        qk: format of queries and keys: "int8", "fp8", "nvfp4".
        pv: format of weights and values: "fp8", "fp16", "nvfp4".
        qk_quant_gran: rows that share a scale, of `GRANULARITIES`.
        geometry: whose tiles the groups are parts of, "sm90" or "sm89".
        quantizer: whose rounding of int8, "triton" or "cuda"; "" for other formats.
        pv_accum_dtype: how P V is summed, of `ACCUMULATORS`; "fp32+fp16" takes smaller values.
        smooth_k: whether keys are coded without their mean.
        smooth_v: whether values are coded without their mean.
        smooth_q: whether queries are coded without theirs, which needs keys beside their codes.
        km_scope: keys that share a mean: of a "sequence", or all that are "packed" together.
        is_varlen: whether sequences of several lengths are packed one after the other.
    """

    head_dim: int
    dtype: str = "bfloat16"
    qk: str = "int8"
    pv: str = "fp8"
    qk_quant_gran: str = "per_thread"
    geometry: str = "sm90"
    quantizer: str = "triton"
    pv_accum_dtype: str = "fp32+fp32"
    smooth_k: bool = True
    smooth_v: bool = False
    smooth_q: bool = False
    km_scope: str = "sequence"
    is_varlen: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.head_dim <= HEAD_DIMS[-1]:
            raise ValueError(
                f"head_dim: got {self.head_dim}, needs 1 to {HEAD_DIMS[-1]}; "
                "dsv4.ops.quantized_attention offers no larger heads"
            )
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("qk", self.qk, tuple(GRANULARITIES))
        _check_choice("pv", self.pv, tuple(ACCUMULATORS))
        _check_choice(
            "qk_quant_gran", self.qk_quant_gran, GRANULARITIES[self.qk], f"qk {self.qk!r}"
        )
        _check_choice("geometry", self.geometry, tuple(GEOMETRIES))
        roundings = QUANTIZERS.get(self.qk_quant_gran, ("",))
        _check_choice("quantizer", self.quantizer, roundings, f"granularity {self.qk_quant_gran!r}")
        accumulators = ACCUMULATORS[self.pv]
        _check_choice("pv_accum_dtype", self.pv_accum_dtype, accumulators, f"pv {self.pv!r}")
        if self.smooth_v and self.pv_accum_dtype != SMOOTH_V_ACCUMULATOR.get(self.pv):
            raise ValueError(
                f"smooth_v: got True, pv {quoted(self.pv)} with pv_accum_dtype "
                f"{quoted(self.pv_accum_dtype)} needs False: no kernel adds the mean again"
            )
        if (self.qk == "nvfp4") != (self.pv == "nvfp4"):
            raise ValueError(
                f"pv: got {quoted(self.pv)} beside qk {quoted(self.qk)}, FP4 needs 'nvfp4' for both"
            )
        _check_choice("km_scope", self.km_scope, KM_SCOPES)

    @property
    def tiles(self) -> Geometry:
        """Tiles that groups are parts of."""
        tiles = GEOMETRIES[self.geometry]
        if self.geometry == "sm89" and self.pv_accum_dtype == "fp16+fp32" and self.padded_dim > 64:
            # The official kernel's warps hold half as many queries beside two accumulators.
            return tiles._replace(warp_q=16)
        return tiles

    @property
    def padded_dim(self) -> int:
        """Channels of codes."""
        return next(dim for dim in HEAD_DIMS if self.head_dim <= dim)

    @property
    def key_groups(self) -> Groups:
        """Groups of the keys of a tile."""
        return key_groups(self.qk_quant_gran, self.tiles)

    @property
    def query_groups(self) -> Groups:
        """Groups of the queries of a tile or warp."""
        return query_groups(self.qk_quant_gran, self.tiles)

    @property
    def key_scales(self) -> int:
        """Scales of the keys of a tile."""
        if self.qk == "nvfp4":
            return self.tiles.block_k * self.padded_dim // FP4_BLOCK
        return self.key_groups.count

    @property
    def v_max(self) -> float:
        """Largest code of V. P and V of 64 keys must not overflow an fp16 accumulator."""
        return 2.25 if self.pv_accum_dtype == "fp32+fp16" else 448.0

    @property
    def row_align(self) -> int:
        """Bytes that rows of queries and outputs start at a multiple of: vectors, where whole ones
        make up a row."""
        size = 4 if self.dtype == "float32" else 2
        return size if self.head_dim * size % VECTOR_BYTES else VECTOR_BYTES

    @property
    def is_per_head(self) -> bool:
        """Whether all queries of a head share one scale, and all keys."""
        return self.qk_quant_gran == "per_head"

    @property
    def has_pairs_of_warps(self) -> bool:
        """Whether queries share a scale that two warps of 16 have."""
        return self.qk_quant_gran in ("per_thread", "per_warp") and self.tiles.warp_q > 16

    @property
    def has_wide_blocks(self) -> bool:
        """Whether more queries share a scale than a work tile is sure to have all of: a block of
        128."""
        return self.qk_quant_gran == "per_block" and self.tiles.block_q > 64

    @property
    def has_query_maxima(self) -> bool:
        """Whether the largest queries are found in a launch before the attention."""
        return self.is_per_head or self.has_wide_blocks

    @property
    def has_statistics(self) -> bool:
        """Whether codes depend on all keys or values of a sequence."""
        return self.smooth_k or self.smooth_v or self.is_per_head or self.pv == "fp8"

    @property
    def folds_scale(self) -> bool:
        """Whether queries are multiplied by softmax scale and log2(e) before they are coded."""
        return self.qk_quant_gran == "per_block"


@dataclass(frozen=True)
class QuantizedAttentionConfig(QuantizeKvConfig):
    """Identity of `quantized_attention`.

    Attributes:
        causal: "none"; or "top_left": query i sees keys up to i; or "bottom_right": the last query
            sees all keys.
        mask: "none", "bool" (True: seen), or "float" (added to the scaled scores).
        sm_scale: factor on q . k.
    """

    causal: str = "none"
    mask: str = "none"
    sm_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice("causal", self.causal, CAUSAL)
        _check_choice("mask", self.mask, MASKS)
        if self.mask != "none" and self.is_varlen:
            raise ValueError(f"mask: got {quoted(self.mask)}, packed sequences have none")


def has_codes_kernel(config: QuantizeKvConfig, arch: str = "sm_90a") -> bool:
    """Whether the kernels of an architecture take a configuration of `quantize_kv`."""
    return not without_kernel(config, arch)


def has_kernel(config: QuantizedAttentionConfig, arch: str = "sm_90a") -> bool:
    """Whether the attention kernel of an architecture takes a configuration."""
    return not without_kernel(config, arch)


def most_channels(arch: str, pv: str, geometry: str) -> int:
    """Most channels that the kernels of an architecture have beside these formats; where they have
    no kernel for any other reason, all."""
    found = dict(zip(BOTH, KERNEL_HEAD_DIMS[arch].get(pv, ())))
    return found.get(geometry, HEAD_DIMS[-1])


def without_kernel(config: QuantizeKvConfig, arch: str) -> str:
    """Which options of a configuration the kernels of an architecture do not have, by name and
    value; empty where they have all."""
    geometries = KERNEL_GEOMETRIES[arch].get(config.qk, ())
    accumulators = KERNEL_ACCUMULATORS[arch].get(config.pv, ())
    most = most_channels(arch, config.pv, config.geometry)
    is_attention = isinstance(config, QuantizedAttentionConfig)
    found = {
        "qk": not geometries,
        "dtype": config.dtype == "float32",
        "head_dim": config.row_align != VECTOR_BYTES or config.head_dim > most,
        "smooth_q": config.smooth_q and config.qk != "nvfp4",
    }
    if is_attention:
        found["geometry"] = config.geometry not in geometries
        found["pv_accum_dtype"] = config.pv_accum_dtype not in accumulators
        # Scores are compared before they are scaled.
        found["sm_scale"] = config.sm_scale < 0
    else:
        found["km_scope"] = config.km_scope != "sequence"
    return ", ".join(f"{name} {getattr(config, name)!r}" for name, is_so in found.items() if is_so)


def _check_choice(name: str, value: object, choices: tuple[str, ...], where: str = "") -> None:
    if value not in choices:
        needs = " or ".join(map(repr, choices))
        needs = f"{where} needs {needs}" if where else f"needs {needs}"
        raise ValueError(f"{name}: got {quoted(value)}, {needs}")
