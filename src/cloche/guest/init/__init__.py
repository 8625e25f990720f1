"""Init: process 1 of a sandbox, which starts programs and serves the host."""
