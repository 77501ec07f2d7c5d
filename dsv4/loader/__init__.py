"""Checkpoint I/O and weight-layout conversion."""
