"""Order of accesses: vector clocks, lanes of a warp, flags in memory."""
