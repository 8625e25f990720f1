"""A server with a certificate for its domain: for clients that know a domain, and connect by TLS only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.conftest import REPOSITORY, RunningServer, free_port, serving

DOMAIN = "cloche.localhost"
LOCALHOST_NAMES = REPOSITORY / "tests" / "localhost_names"


class SecureServer(NamedTuple):
    running: RunningServer
    domain: str  # with the port
    cert: Path

    @property
    def trust(self) -> dict[str, str]:
        """Variables of a Python client's process, for which the certificate is good and the names resolve."""
        return {"SSL_CERT_FILE": str(self.cert), "PYTHONPATH": str(LOCALHOST_NAMES)}

    @property
    def environ(self) -> dict[str, str]:
        """The environment of a client of E2B that knows a domain only."""
        return {**os.environ, **self.trust, "E2B_API_KEY": self.running.key, "E2B_DOMAIN": self.domain}


@contextmanager
def serving_by_domain(data_dir: str | Path, place: Path) -> Iterator[SecureServer]:
    cert, key = make_certificate(place)
    port = free_port()
    domain = f"{DOMAIN}:{port}"
    options = ("--port", str(port), "--domain", domain, "--tls-cert", str(cert), "--tls-key", str(key))
    with serving(data_dir, *options) as running:
        yield SecureServer(running, domain, cert)


def make_certificate(place: Path) -> tuple[Path, Path]:
    """As docs/dialects/e2b.md says."""
    cert, key = place / "cert.pem", place / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "365", "-subj", f"/CN={DOMAIN}"]
    made += ["-addext", "basicConstraints=critical,CA:FALSE"]
    names = f"subjectAltName=DNS:{DOMAIN},DNS:*.{DOMAIN},DNS:localhost,IP:127.0.0.1"
    try:
        subprocess.run([*made, "-addext", names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    return cert, key
