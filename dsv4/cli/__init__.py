"""The `dsv4` command."""
