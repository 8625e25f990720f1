"""E2B's wire protocol: the control plane, envd (port 49983) and the code server (port 49999). See docs/dialects/e2b.md.

routing.py     which sandbox and port a request is for
access.py      who may enter there; tokens.py has the tokens and the signatures of file URLs
dialect.py     puts these in front of the planes
planes.py      paths that are not there, and leave for web pages
residents.py   a sandbox as E2B knows it: its tokens, its template's alias, what was asked for when it was made
control*.py    the control plane; desk.py is what its handlers share, repeats.py the Idempotency-Key
code*.py       the code server
connect.py     Connect-RPC with JSON
envd*.py       envd: files_http.py, filesystem.py and process.py are its parts
"""

from cloche.api.e2b.app import E2b as E2b
