"""The format of an image: the files of a sandbox's writable places. The host never parses it.

MAGIC  then records, each a HEAD, the name, and the data of its kind:
PLACE      the name of a place: the following records are in it
DIRECTORY  the following records are in it
FILE       `size` bytes, the content; then `attributes`
PIECES     a file of `size` bytes, most of them here or in holes: PIECE and its bytes, until one of no length;
           then `attributes`
SYMLINK    `size` bytes, where it leads
FIFO       nothing
LINK       one more name of the entry marked SHARED that was number `size` of its place
LEAVE      the directory or place ends; mode, owner and times are its own; then `attributes`
END        nothing follows: without it, an image was cut short
"""

from __future__ import annotations

import struct

MAGIC = b"cloche image 1\n"
# kind, flags, mode, uid, gid, atime and mtime (seconds, nanoseconds), size, length of the name, number of attributes
HEAD = struct.Struct("<BBHIIqIqIQHH")
PIECE = struct.Struct("<QQ")  # where it lies in its file, length
ATTRIBUTE = struct.Struct("<HI")  # lengths of the name and of the value, which follow

PLACE, DIRECTORY, FILE, PIECES, SYMLINK, FIFO, LINK, LEAVE, END = range(1, 10)
SHARED = 1  # a flag: there are more names for this one

INLINE_BYTES = 128 << 10  # the largest FILE
MAX_NAME_BYTES = 255
MAX_TARGET_BYTES = 4096
MAX_ATTRIBUTE_NAME_BYTES = 255
MAX_ATTRIBUTE_BYTES = 64 << 10
# What any program may set, and what `setfacl` does.
OWN_ATTRIBUTES = "user."
ACCESS_LISTS = ("system.posix_acl_access", "system.posix_acl_default")

SECOND_NS = 1_000_000_000
