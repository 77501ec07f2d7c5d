"""Seams between sublayers: hyper-connections (mHC), norm and FP8 quantisation."""
