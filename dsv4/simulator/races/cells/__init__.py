"""Records of the accesses to each piece of memory."""
