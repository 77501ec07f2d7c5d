"""Our operators inside other packages' models."""
