"""Kernels of the indexer for Blackwell."""
