"""URLs of indexes, and of what their pages name: where they lead, and what may be sent there."""

from __future__ import annotations

import re
from base64 import b64encode
from typing import NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

MAX_URL = 4096

_DEFAULT_PORTS = {"http": 80, "https": 443}
_PLAIN = re.compile(r"[\x21-\x7e]+")


class BadURL(ValueError):
    """It leads to no HTTP server."""


class Origin(NamedTuple):
    scheme: str
    host: str
    port: int


def origin(url: str) -> Origin:
    """Raises BadURL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise BadURL("it is not a URL") from None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise BadURL("it does not begin with https:// and a host")
    return Origin(parts.scheme, parts.hostname.removesuffix("."), port or _DEFAULT_PORTS[parts.scheme])


def join(base: str, reference: str) -> str:
    """Where a reference in the page at `base` leads, without a fragment or anybody's password. Raises BadURL."""
    if len(reference) > MAX_URL:
        raise BadURL(f"it is longer than {MAX_URL} characters")
    try:
        url = urljoin(base, reference.strip())
        parts = urlsplit(url)
    except ValueError:
        raise BadURL("it is not a URL") from None
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))
    bare = quote(bare, safe="%/:?#[]@!$&'()*+,;=~")
    if not _PLAIN.fullmatch(bare):
        raise BadURL("it is not a URL")
    origin(bare)
    return bare


def downgrades(before: str, after: str) -> bool:
    """Whether going from one to the other gives up TLS."""
    return origin(before).scheme == "https" and origin(after).scheme != "https"


class Credential(NamedTuple):
    """What is sent to one host, over one scheme, below one path."""

    origin: Origin
    path: str
    authorization: str

    def __repr__(self) -> str:  # it ends up in logs and tracebacks
        return f"Credential({self.origin.host!r})"


class Keyring:
    """Who this host is to whom. The most exact path wins, and where there are equals the first that was added."""

    def __init__(self) -> None:
        self._credentials: list[Credential] = []

    def add(self, url: str, authorization: str) -> None:
        """Raises BadURL."""
        place, path = origin(url), urlsplit(url).path
        if authorization.isascii() and authorization.isprintable():
            self._credentials.append(Credential(place, path if path.endswith("/") else path + "/", authorization))

    def authorization(self, url: str) -> str | None:
        """For exactly the scheme, host and port that it was given for. Raises BadURL."""
        place, path = origin(url), urlsplit(url).path + "/"
        fit = [each for each in self._credentials if each.origin == place and path.startswith(each.path)]
        return max(fit, key=lambda each: len(each.path)).authorization if fit else None


def basic(user: str, password: str) -> str:
    return "Basic " + b64encode(f"{user}:{password}".encode()).decode()


def split_userinfo(url: str) -> tuple[str, str | None]:
    """A URL without the user and password in it, and the header that says them. Raises BadURL."""
    bare = join(url, "")
    userinfo, at, _ = urlsplit(url.strip()).netloc.rpartition("@")
    if not at:
        return bare, None
    user, _, password = userinfo.partition(":")
    return bare, basic(unquote(user), unquote(password))
