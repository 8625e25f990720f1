"""E2B's wire protocol: the control plane, envd (port 49983) and the code server (port 49999).

See docs/dialects/e2b.md.

app.py          the ASGI application: chooses the plane, checks tokens, allows CORS; the routes of the control plane
context.py      E2bContext, shared by the handlers of the control plane; errors in E2B's format
port_target.py  the sandbox and port that a request is for
registry.py     E2bSandboxes: tokens, template alias and creation options of a sandbox; file URL signatures
sandboxes.py, snapshots.py, volumes.py, templates.py, network.py  the control plane, with *_schema.py
code.py         the code server
connect.py      Connect-RPC with JSON
envd.py         envd over HTTP; filesystem.py and process.py are its Connect services
"""

from cloche.api.e2b.app import E2b as E2b
