"""Low-precision attention for Hopper."""
