"""What each family of instructions does: generated text and the functions it calls."""
