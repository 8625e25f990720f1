"""OpenSandbox's wire protocol: the lifecycle API and execd (port 44772). See docs/dialects/opensandbox.md.

dialect.py     the routes as one application
replies.py     answers in OpenSandbox's shapes
known.py       a sandbox as OpenSandbox knows it: what was asked for when it was made, its token
lifecycle*.py  sandboxes are made, found, listed, renewed and ended; desk.py is what its handlers share
egress.py      what a sandbox may reach, read and changed; network_wire.py is that in OpenSandbox's words
vault*.py      credentials that the proxy adds to requests, and no program sees
execd*.py      code and contexts inside one sandbox
quantities.py  "500m" and "2Gi"
absent.py      what OpenSandbox has and this server has not
"""

from cloche.api.opensandbox.app import OpenSandbox as OpenSandbox
