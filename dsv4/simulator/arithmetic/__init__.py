"""Number formats and arithmetic on numpy vectors, bit for bit."""
