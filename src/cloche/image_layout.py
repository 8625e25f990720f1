"""Where the parts of an imported image lie: `templates/` writes them, and `isolation/` mounts them."""

from __future__ import annotations

IMAGE_DIRECTORY = "rootfs"  # in the template's directory: the image's files
SYSTEM_DIRECTORIES = ("dev", "proc", "root", "run", "sys", "tmp")  # sandboxes have their own instead of the image's
MERGED_DIRECTORIES = ("home", "mnt", "opt", "var")  # sandboxes have places of their own in them
MAX_ENTRIES = 200  # of the root and of the merged directories: each of them is a mount
ETC_DIRECTORY = "/opt/cloche/etc"  # our own files of /etc, to which links in the image's /etc lead
OWN_ETC = (
    "passwd",
    "group",
    "hosts",
    "hostname",
    "resolv.conf",
    "nsswitch.conf",
    "shells",
    "profile",
    "bash.bashrc",
    "pip.conf",
    "uv",
    "npmrc",
    "cloche-wgetrc",
)
SITE_FILE = "/opt/cloche/image.pth"  # read at the start of the image's own Python
PRIVATE_LOADER = "/opt/cloche/ld"  # of our Python, in an image that has none: a link to LOADER_COPY
LOADER_COPY = "/opt/cloche/env/loader"
PRIVATE_LIBRARIES = "/opt/cloche/system"  # the host's, for that
SHARED_DIRECTORY = "/opt/cloche/shared"  # the library of the template's Python, where it has one outside of /usr
