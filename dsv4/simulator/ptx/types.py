"""PTX's fundamental types."""

from __future__ import annotations

TYPE_BITS = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16,
    "b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "b64": 64, "u64": 64,
    "s64": 64, "f64": 64, "f32x2": 64, "b128": 128,
}  # fmt: skip
