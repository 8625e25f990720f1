"""OpenSandbox's wire protocol: the lifecycle API and execd (port 44772).

See docs/dialects/opensandbox.md. `OpenSandbox` is the ASGI application.

app.py          the ASGI application, and the routes that this server does not support
context.py      OpenSandboxContext, shared by all handlers; error codes
registry.py     per-sandbox state: the stored create request, used contexts, tokens
lifecycle.py    sandboxes, pauses and snapshots; lifecycle_schema.py has its requests and responses
volumes.py      volumes of new sandboxes
ports.py        programs' own ports
server.py       templates, health and what happened to sandboxes
egress.py       network policies (network_schema.py), and credentials that the proxy adds to requests, hidden
                from programs (credentials_schema.py)
execd.py        what handlers of execd share: its token and its errors; its metrics
code.py         code and contexts; stream.py encodes the events of these, of commands and of sessions
programs.py     contexts of languages without a kernel
commands.py     commands, in the foreground and in the background
sessions.py     bash sessions
files.py        files and directories
"""

from cloche.api.opensandbox.app import OpenSandbox as OpenSandbox
