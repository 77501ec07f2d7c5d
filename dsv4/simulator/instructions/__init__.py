"""Semantics of each family of instructions: generated text and the functions it calls."""
