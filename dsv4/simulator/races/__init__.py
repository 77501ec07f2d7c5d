"""The race checker: who may touch what, and what orders it."""
