"""Mixture of experts: routed experts and the shared one, weights in M, tokens in N."""
