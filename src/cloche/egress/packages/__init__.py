"""The package index of a sandbox: `pip`, `uv` and `npm` install through it, with or without a network.

A program names a project and a file, never a URL: the host fetches files that a page of a configured index
names, and nothing else. The indexes' addresses, and this host's credentials, stay on the host.
"""
