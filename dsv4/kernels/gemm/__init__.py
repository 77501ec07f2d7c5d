"""Linear layers that stream weights: FP8 with block scales."""
