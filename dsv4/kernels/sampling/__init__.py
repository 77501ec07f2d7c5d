"""Kernel of the sampler: the token of each row of logits, drawn or the likeliest."""
