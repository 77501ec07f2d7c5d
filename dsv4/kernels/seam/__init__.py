"""Seams between sublayers: hyper-connections (mHC), norm and FP8 quantisation, in one launch or,
for many tokens, two."""
