"""Benchmarks: `dsv4 bench`."""
