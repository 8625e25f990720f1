"""Open Terminal's wire, which Open WebUI speaks: a workspace per user, whose operations are tools of a model.

A workspace is a sandbox. What has to look into files runs inside it (`workspace_program.py`).
"""

from cloche.api.open_terminal.app import OPEN_TERMINAL_PREFIX, OpenTerminal

__all__ = ["OPEN_TERMINAL_PREFIX", "OpenTerminal"]
