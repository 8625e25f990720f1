"""What the product is: sandboxes, contexts, executions, files, processes and the pool. No HTTP, no CLI."""
