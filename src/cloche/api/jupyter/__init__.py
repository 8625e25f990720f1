"""Jupyter's wire protocol: that of a Kernel Gateway, and of a Jupyter Server's kernels, sessions and contents.

See docs/dialects/jupyter.md. `Jupyter` is the ASGI application.

app.py          the ASGI application: kernelspecs, kernels and the routes of a whole server
context.py      JupyterContext, shared by all handlers; the kernels of all owners, and errors
login.py        keys as Jupyter's clients send them; login by password
kernels.py      a kernel: a context of a sandbox, its clients, and its queue of executions
messages.py     Jupyter's messages: JSON text, and the binary subprotocol
outputs.py      events of an execution as Jupyter's messages
answers.py      answers to questions about code and history
channels.py     the WebSocket of a kernel
sessions.py     sessions, which name a kernel by a document
contents.py     the files of a sandbox
"""

from cloche.api.jupyter.app import Jupyter as Jupyter
