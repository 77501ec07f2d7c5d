"""Serving: scheduler, captured forwards, sampling, generation."""
