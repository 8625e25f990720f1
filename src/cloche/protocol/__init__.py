"""Our own protocol, `/api/v1`, as both of its ends know it.

JSON throughout. Bytes are base64, and `binary` beside them names which values those are.
"""

PREFIX = "/api/v1"
OWN_ONLY = "x-cloche-own-only"  # a header: whoever asks wants no more than what is theirs, also where they may
