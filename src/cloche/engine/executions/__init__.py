"""Running code in a sandbox: contexts, executions, kernels, their streams, histories and tool calls."""
