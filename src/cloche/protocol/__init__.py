"""Our own protocol, `/api/v1`, as both of its ends know it.

JSON throughout. Bytes are base64, and `binary` beside them names which values those are.
"""

PREFIX = "/api/v1"
