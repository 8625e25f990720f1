"""OpenSandbox's wire protocol: the lifecycle API and execd (port 44772).

See docs/dialects/opensandbox.md. `OpenSandbox` is the ASGI application.

common.py       responses in OpenSandbox's format
context.py      OpenSandboxContext, shared by the handlers of the lifecycle API
registry.py     per-sandbox state: the stored create request, used contexts, tokens
lifecycle.py    sandboxes, pauses and snapshots; lifecycle_schema.py has its requests and responses
egress.py       network policies, with network_schema.py
credentials.py  credentials that the proxy adds to requests, hidden from programs; with credentials_schema.py
execd.py        code and contexts inside one sandbox
unsupported.py  routes that this server does not support
"""

from cloche.api.opensandbox.app import OpenSandbox as OpenSandbox
