"""Operator runtime: compiled-kernel cache, registry, compilation ahead of time, op registration."""
