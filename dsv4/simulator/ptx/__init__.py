"""Parser of PTX: text to instructions, instructions to basic blocks."""
