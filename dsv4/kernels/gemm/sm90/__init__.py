"""Linear layers for Hopper."""
