"""nn.Modules: one per box of the architecture diagram."""
