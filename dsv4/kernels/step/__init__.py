"""Kernel of what all layers need of a forward pass: positions, requests, places in the caches."""
