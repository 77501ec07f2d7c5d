"""Configuration, assembled model, sampling and generation."""
