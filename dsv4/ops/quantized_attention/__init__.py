"""Low-precision attention: SageAttention's numerics, FP8 and FP4, for any device."""
