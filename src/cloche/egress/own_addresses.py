"""Which addresses are this host's own, public ones among them: its services listen there, too."""

from __future__ import annotations

import errno
import os
import socket
import struct

from cloche.egress.destination import Address

# Of <linux/rtnetlink.h>.
_NETLINK_ROUTE = 0
_NEW_ROUTE, _GET_ROUTE = 24, 26
_REQUEST = 1
_DESTINATION = 1
_LOCAL, _ANYCAST = 2, 4
_ERROR = 2
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_HEADER, _ROUTE, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=8BI"), struct.Struct("=HH")
_KIND_AT = _HEADER.size + 7


def is_own(address: Address) -> bool:
    """Asked of the kernel each time, as addresses come and go. Nothing is sent, and nothing waits.

    An address that somebody else translates to one of this host is not known to it, and is not its own here.
    """
    try:
        return _leads_back(address)
    except OSError:  # some containers have no routing socket
        return _speaks_from(address)


def _leads_back(address: Address) -> bool:
    """Whether the way there ends in this host. Raises OSError."""
    target = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(address.packed), _DESTINATION) + address.packed
    asked = _ROUTE.pack(_family(address), address.max_prefixlen, 0, 0, 0, 0, 0, 0, 0) + target
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _NETLINK_ROUTE) as kernel:
        kernel.send(_HEADER.pack(_HEADER.size + len(asked), _GET_ROUTE, _REQUEST, 1, 0) + asked)
        reply = kernel.recv(4096)  # it is there as soon as the question was taken
    kind = _HEADER.unpack_from(reply)[1]
    if kind == _ERROR:
        number = -struct.unpack_from("=i", reply, _HEADER.size)[0]
        if number in _NO_WAY:
            return False
        raise OSError(number, os.strerror(number))
    return kind == _NEW_ROUTE and reply[_KIND_AT] in (_LOCAL, _ANYCAST)


def _speaks_from(address: Address) -> bool:
    """Whether who connects there does so from there, as is so for most of a host's own. Where it cannot be found out,
    as when there are no descriptors left, it counts as one."""
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as asking:
            asking.connect((str(address), 9))
            return bool(asking.getsockname()[0] == str(address))
    except OSError as error:
        return error.errno not in _NO_WAY


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if address.version == 6 else socket.AF_INET
