"""The zygote: the process that imports a template once, and forks into sandboxes."""
