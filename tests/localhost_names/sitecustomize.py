"""For clients in processes of their own, by PYTHONPATH: names below `localhost` are this machine.

systemd-resolved, nss-myhostname, browsers and curl resolve them so. A host of tests may have none of the first two.
"""

import contextlib
import socket

_getaddrinfo = socket.getaddrinfo


def map_name(host):
    name = host.decode() if isinstance(host, bytes) else host
    return "127.0.0.1" if name and name.endswith(".localhost") else host


def getaddrinfo(host, *args, **kwargs):
    return _getaddrinfo(map_name(host), *args, **kwargs)


socket.getaddrinfo = getaddrinfo

# Its loop asks the C library.
with contextlib.suppress(ImportError):
    import uvloop

    _loop_getaddrinfo = uvloop.Loop.getaddrinfo
    uvloop.Loop.getaddrinfo = lambda loop, host, *args, **kwargs: _loop_getaddrinfo(
        loop, map_name(host), *args, **kwargs
    )
