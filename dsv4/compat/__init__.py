"""Other packages' interfaces over our operators."""
