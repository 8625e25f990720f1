"""File work inside a sandbox, by init, for the host."""
