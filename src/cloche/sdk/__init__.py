"""The public library: `Sandbox`, `AsyncSandbox`, `run` and `arun`, over an engine in this process."""
