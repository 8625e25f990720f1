"""The Model Context Protocol: a code interpreter for agents, over stdio and over HTTP.

The tools are written once, over the library's backend interface (`cloche.sdk.backend`): a sandbox of the engine
in this process, or one on a server. The package `mcp` is an extra, which is imported when the first client
comes.
"""

from __future__ import annotations

import importlib.util

from cloche import errors

# The optional package `mcp`: checks for its installation.

# Not by the extra's name: the `cloche` of PyPI is another project.
INSTALL_ADVICE = """MCP needs one more package: pip install "mcp>=2" in Cloche's environment"""


def is_installed() -> bool:
    """Whether the package is installed. Imports nothing."""
    return importlib.util.find_spec("mcp") is not None


def check_installed() -> None:
    """Raises Unavailable, which names the package to install."""
    if not is_installed():
        raise errors.Unavailable(INSTALL_ADVICE)
