"""LibreChat's code API, for all generations of its clients. See docs/dialects/librechat.md.

dialect.py     the routes as one application; desk.py is what its handlers share
replies.py     answers in LibreChat's shapes
identity.py    who asks: a key, or a token (jwt.py, with the keys of jwt_keys.py); pace.py is how often
execution.py   POST /exec
  request.py   what is asked
  workshop.py  makes places for programs, and runs programs in them
  places.py    a place is a sandbox with inputs in it (inputs.py), and what is left there is kept (outputs.py); it is of
               its program alone, or of a session (sessions.py)
  programs.py  starts a program of any of languages.py; model.py runs Python where variables last
  outcome.py   what came of it, with notes.py for the model
"""

from cloche.api.librechat.app import LibreChat as LibreChat
