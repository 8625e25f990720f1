"""The package index at a sandbox's door: `pip`, `uv` and `npm` install through it, with or without a network.

A program names a project and a file, never a URL: the host fetches what a page of a configured index names, and
nothing else. The indexes' addresses, and what proves who this host is, stay on the host.
"""
