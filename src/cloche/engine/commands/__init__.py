"""Commands and background jobs of a sandbox."""
