"""The Model Context Protocol: a code interpreter for agents, over stdio and over HTTP.

What the tools do is written once, over the library's seam (`cloche.sdk.seam`): a sandbox of the engine in this process,
or one on a server. The package `mcp` is an extra, which is imported when the first client comes.
"""
