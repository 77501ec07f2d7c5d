"""Sizes of key tiles, for kernels and for the host's plans alike; plain Python."""

TILE_KEYS = 64  # keys of a step
# Of a gathered key tile: a bit for each row that is a key; 1 in the window; 0. See `tile_info`.
TILE_INFO_WORDS = 4
