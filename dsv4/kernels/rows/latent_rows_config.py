"""Configuration of `latent_rows`, and its arguments: T tokens of B requests, pages of P keys.

Imports neither cutlass nor torch, so that every layer may use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.kernels.compressor import config as compressors
from dsv4.kernels.compressor.config import CompressConfig
from dsv4.kernels.kit.args import In, InOut, OptIn, OptInOut, OptOut, Scalar, TensorArg
from dsv4.kernels.kit.kv_entry import ALIGNMENT, ROPE_DIM
from dsv4.kernels.rows import args as norms
from dsv4.kernels.rows import kv_insert_config as insertions
from dsv4.kernels.rows.config import RmsNormFp8Config
from dsv4.kernels.rows.kv_insert_config import KvInsertConfig

KEY_DIMS = (64, 128, 512)  # of kernels


@dataclass(frozen=True)
class LatentRowsConfig:
    """Identity of a compiled `latent_rows`.

    Attributes:
        dim: channels of a key, of the window and of compressed entries.
        eps: of all norms; at least 1e-18.
        kv_format: of the pools of keys: "bf16" or "fp32" rows, or "fp8" entries.
        is_rounded: whether rows hold what FP8 entries would, and index keys FP4.
        uniform_scale: as in `KvInsertConfig`.
        rope_dim: rotated channels, the last ones.
        query_dim: elements of a query latent; 0: none is normalised.
        ratio: tokens of a compressed entry; 0: there is no compressor.
        overlap: whether the block before is pooled, too.
        latent: what means are rounded to: "bf16" or "fp32".
        index_dim: channels of an index key; 0: there is no indexer.
        index_format: of the pool of index keys: as `kv_format`, or "fp4".
    """

    dim: int
    eps: float
    kv_format: str = "fp8"
    is_rounded: bool = True
    uniform_scale: bool = False
    rope_dim: int = ROPE_DIM
    query_dim: int = 0
    ratio: int = 0
    overlap: bool = False
    latent: str = "bf16"
    index_dim: int = 0
    index_format: str = "fp8"

    def __post_init__(self) -> None:
        for name in ("query_dim", "ratio", "index_dim"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.index_dim and not self.ratio:
            raise ValueError("ratio: got 0, an indexer needs the ratio of its compressor")
        # Each refuses what it cannot do.
        self.insertion, self.norm, self.compressor, self.indexer  # noqa: B018

    @property
    def insertion(self) -> KvInsertConfig:
        """What writes keys of the window."""
        options = self.kv_format, self.is_rounded, self.uniform_scale, self.rope_dim
        return KvInsertConfig(self.dim, self.eps, *options)

    @property
    def norm(self) -> RmsNormFp8Config | None:
        """What normalises query latents."""
        return RmsNormFp8Config(self.query_dim, self.eps) if self.query_dim else None

    @property
    def compressor(self) -> CompressConfig | None:
        """What writes compressed entries."""
        if not self.ratio:
            return None
        return CompressConfig(
            self.dim, self.ratio, self.overlap, self.eps, self.latent, self.kv_format, False,
            self.is_rounded, self.uniform_scale, self.rope_dim,
        )  # fmt: skip

    @property
    def indexer(self) -> CompressConfig | None:
        """What writes index keys."""
        if not self.index_dim:
            return None
        return CompressConfig(
            self.index_dim, self.ratio, self.overlap, self.eps, self.latent, self.index_format,
            True, self.is_rounded, rope_dim=self.rope_dim,
        )  # fmt: skip


def has_kernel(config: LatentRowsConfig) -> bool:
    """Whether kernels take a configuration: those of all its parts."""
    parts = [part for part in (config.compressor, config.indexer) if part is not None]
    return (
        config.dim in KEY_DIMS
        and config.rope_dim == ROPE_DIM
        and config.kv_format != "fp32"
        and all(compressors.has_kernel(part) for part in parts)
    )


def _compressor(name: str, prefix: str = "") -> tuple[TensorArg, ...]:
    """Tensors of a compressor of its own; sizes are no other's, which may be absent."""
    rows, size, width = f"{name}_rows", f"{name}_size", f"{name}_width"
    own = {"differentiable": True, "align": 16}
    return (
        OptIn(f"{prefix}values", f"B {name}_C {width}", "float32", align=16),
        OptIn(f"{prefix}scores", f"B {name}_C {width}", "float32", align=16),
        OptIn(f"{prefix}ape", f"{name}_ratio {width}", "float32", align=16),
        OptInOut(f"{prefix}state", f"{rows} {size} {name}_two {width}", "float32", **own),
        OptIn(f"{name}_weight", f"{name}_d", "float32", align=16),
        OptInOut(
            f"{name}_pool",
            f"{name}_pages {name}_P {name}_row",
            f"{name}_dtype",
            align=ALIGNMENT,
            inner_align=f"{name}_align",
            differentiable=True,
        ),
    )


# float32 is for the torch implementation.
_ROWS = {"dtype": "bfloat16", "also": ("float32",), "align": 16}

ARGS = (
    In("x", "T d", **_ROWS),
    In("weight", "d", "float32", align=16),
    In("rope", "R rope_dim", "float32", align=16),
    In("positions", "T", "int32"),
    In("slots", "T", "int32"),
    InOut(
        "pool",
        "pages P row",
        "kv_dtype",
        align=ALIGNMENT,
        inner_align="align",
        differentiable=True,
    ),
    OptIn("query", "T query_dim", **_ROWS),
    OptIn("query_weight", "query_dim", "float32", align=16),
    OptOut("codes", "T query_dim", "float8_e4m3fn", align=8),
    OptOut("scales", "T g", "float8_e8m0fnu"),
    OptOut("norm_out", "T query_dim", **_ROWS),
    OptIn("state_rows", "B", "int32"),
    OptIn("starts", "B", "int32"),
    OptIn("lens", "B", "int32"),
    OptIn("entry_slots", "B K", "int32"),
    *_compressor("entry"),
    *_compressor("index", "index_"),
    Scalar("num_ctas"),
)
QUERY = ("query", "query_weight", "codes", "scales", "norm_out")
REQUESTS = ("state_rows", "starts", "lens", "entry_slots")
COMPRESSOR = tuple(arg.name for arg in _compressor("entry"))
INDEXER = tuple(arg.name for arg in _compressor("index", "index_"))


def values(config: LatentRowsConfig) -> dict[str, int | str]:
    """The sizes and dtypes that a kernel is compiled for."""
    own = insertions.values(config.insertion)
    found = {**own, "align": own["entry_align"]}
    del found["entry_align"]
    if config.norm is not None:
        norm = norms.values(config.norm)
        found |= {"query_dim": norm["d"], "g": norm["g"]}
    for name, part in (("entry", config.compressor), ("index", config.indexer)):
        found |= {f"{name}_dtype": "uint8", f"{name}_align": ALIGNMENT}
        if part is not None:
            sizes = compressors.values(part)
            found |= {f"{name}_{key}": sizes[key] for key in ("d", "width", "ratio", "two", "row")}
            found |= {f"{name}_dtype": sizes["kv_dtype"], f"{name}_align": sizes["entry_align"]}
    return found


def needed(config: LatentRowsConfig) -> dict[str, int | str]:
    """Rows of each optional tensor of a call by its name: a number, or the name of a size; what is
    not there must be absent."""
    found: dict[str, int | str] = {}
    sizes = values(config)
    names = [QUERY] * bool(config.query_dim) + [REQUESTS + COMPRESSOR] * bool(config.ratio)
    names += [INDEXER] * bool(config.index_dim)
    leading = {arg.name: arg.shape[0] for arg in ARGS if isinstance(arg, TensorArg)}
    for name in (name for group in names for name in group):
        found[name] = sizes.get(leading[name], leading[name])
    return found
