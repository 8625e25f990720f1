"""Whom programs in a sandbox with a network trust: this host's authorities, and where it has secrets one of its own."""

from __future__ import annotations

import os
import ssl

from cloche import errors
from cloche.engine.guest import Guest

# One place for the whole life of a sandbox, so that a secret that is added later needs no other environment.
BUNDLE = "/run/cloche/ca.pem"
_BY_NAME = dict.fromkeys(
    (
        "SSL_CERT_FILE",  # OpenSSL, Python's ssl, httpx, uv, Go, Ruby
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "GIT_SSL_CAINFO",
        "PIP_CERT",
        "NODE_EXTRA_CA_CERTS",
        "DENO_CERT",
        "CARGO_HTTP_CAINFO",
        "AWS_CA_BUNDLE",
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    ),
    BUNDLE,
)
TRUST_ENV = {**_BY_NAME, "SYSTEM_WGETRC": "/etc/cloche-wgetrc"}  # wget: see isolation/rootfs.py
MAX_BYTES = 16 << 20
_PLACES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_SEEN_INSIDE = ("/etc/ssl/certs/", "/etc/ca-certificates/", "/usr/")  # as in isolation/rootfs.py


async def write_bundle(guest: Guest, own: bytes = b"") -> None:
    """`own` is the certificate of the sandbox's own authority. Raises NoSpace, FileError, Gone."""
    system = system_bundle()
    inside = system is not None and system.startswith(_SEEN_INSIDE)
    content = b"" if inside or system is None else _read(system)
    try:
        await guest.request("trust", content + own, path=BUNDLE, system=system if inside else "")
    except errors.NoSpace:
        raise errors.NoSpace(
            "the sandbox has no space left for the certificates that its network needs: remove some files first"
        ) from None


def system_bundle() -> str | None:
    """The file with the authorities that this host trusts; None where it has no such file."""
    usual = ssl.get_default_verify_paths().cafile  # that of SSL_CERT_FILE, where it is set
    found = next((place for place in (usual, *_PLACES) if place and os.path.isfile(place)), None)
    return None if found is None else os.path.realpath(found)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(MAX_BYTES) + b"\n"
