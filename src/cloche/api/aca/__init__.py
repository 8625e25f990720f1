"""Azure Container Apps' dynamic sessions, for AutoGen, LangChain and LlamaIndex. See docs/dialects/aca.md.

sessions.py   AzureContext: the sandbox of a session, and errors
cells.py      code in a session, and its result
app.py        the routes
"""

from cloche.api.aca.app import AzureSessions as AzureSessions
