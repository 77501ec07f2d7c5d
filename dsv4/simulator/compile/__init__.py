"""Basic blocks of PTX to Python functions over 32-lane vectors."""
