"""Kernels of the indexer for Hopper."""
