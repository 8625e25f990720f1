"""Our own protocol, `/api/v1`, shared by client and server.

JSON throughout. Bytes are base64, and `binary` beside them lists the names of those values.
"""

API_PREFIX = "/api/v1"
OWN_ONLY_HEADER = "x-cloche-own-only"  # a header: the caller wants its own things only, also where it may
