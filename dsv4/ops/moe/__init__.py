"""Mixture of experts: operator, weights and their layouts, torch implementation."""
