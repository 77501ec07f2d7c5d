"""Operands of copies and matrix products: descriptors, layouts, formats, accumulators."""
