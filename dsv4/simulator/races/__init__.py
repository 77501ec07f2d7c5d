"""The race checker: accesses to memory, and what orders them."""
