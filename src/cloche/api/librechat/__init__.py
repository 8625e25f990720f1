"""LibreChat's code API, for all generations of its clients. See docs/dialects/librechat.md.

context.py          LibreChatContext, shared by all handlers
replies.py          errors, file names and notes in LibreChat's shapes
identity.py         the caller: a key, or a token (jwt.py); limits.py bounds its rate, memory and queue
request.py          decodes POST /exec and POST /exec/programmatic
exec.py             POST /exec: runs a program in a sandbox (program_sandbox.py)
  inputs.py         writes the caller's files into it; outputs.py stores the files that the program left
  sessions.py       sandboxes that last from program to program
  cells.py          runs Python cells where variables last; `api/programs.py` starts all other programs
  outcome.py        the result of a program
tool_calls.py       POST /exec/programmatic: programs that call tools (dialogue.py, continuation.py)
files.py            uploads, downloads, lists and deletions
"""

from cloche.api.librechat.app import LibreChatApi as LibreChatApi
