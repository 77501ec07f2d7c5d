"""Low-precision attention: quantisers of keys and values, and attention over their codes."""
