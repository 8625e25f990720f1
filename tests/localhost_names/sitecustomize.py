"""For clients in processes of their own, by PYTHONPATH: names below `localhost` are this machine.

systemd-resolved, nss-myhostname, browsers and curl resolve them so. A host of tests may have none of the first two.
"""

import socket

_getaddrinfo = socket.getaddrinfo


def getaddrinfo(host, *args, **kwargs):
    name = host.decode() if isinstance(host, bytes) else host
    return _getaddrinfo("127.0.0.1" if name and name.endswith(".localhost") else host, *args, **kwargs)


socket.getaddrinfo = getaddrinfo
