"""Kernels of the lightning indexer: scores of compressed entries, selection of the best."""
