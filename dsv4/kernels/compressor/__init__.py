"""Kernels of the compressor: state, pooling of blocks, entries."""
