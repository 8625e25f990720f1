"""The product without HTTP and CLI: sandboxes, contexts, executions, files, processes and the pool."""
