"""What each piece of memory remembers of the accesses to it."""
