"""What `cloche doctor` says of networks: who may reach what, where packages come from, whether secrets can be used."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from urllib.parse import urlsplit

from cloche.config import Config
from cloche.isolation.base import Check

SHOWN = 8  # patterns of a long list


def checks(config: Config) -> Iterable[Check]:
    """Raises as reading the host's own configuration of pip and npm does."""
    if config.backend != "namespaces":
        detail = f"{config.backend} has no walls: programs use this host's own network, and policies are refused"
        yield Check(name="policy", state="missing", detail=detail, advice="use namespaces")
        return
    yield Check(name="policy", state="enforced", detail=_policy(config))
    yield Check(name="packages", state="enforced", detail=_packages(config))
    yield _secrets()


def _policy(config: Config) -> str:
    network = config.network
    if not network.allow:
        return "sandboxes of a server reach nothing but their own loopback (network.allow is empty)"
    parts = [f"sandboxes of a server may be allowed {_some(network.allow)}"]
    if network.deny:
        parts.append(f"never {_some(network.deny)}")
    if network.internal:
        parts.append(f"of private addresses {_some(network.internal)}")
    default = _some(network.default) if network.default else "nothing"
    # The products that those clients are of have the internet open unless it is closed.
    parts.append(f"who does not ask gets {default}, and clients of E2B and OpenSandbox that do not ask get all of it")
    return "; ".join(parts)


def _some(patterns: tuple[str, ...]) -> str:
    more = f" and {len(patterns) - SHOWN} more" if len(patterns) > SHOWN else ""
    return ", ".join(patterns[:SHOWN]) + more


def _packages(config: Config) -> str:
    if not config.packages.enabled:
        return "off: pip, uv and npm in sandboxes install nothing (packages.enabled)"
    from cloche.egress.packages.sources import read_sources

    sources = read_sources(config.packages)
    pypi, npm = (_hosts(urls) for urls in (sources.pypi, (sources.npm, *sources.npm_scopes.values())))
    of_pip, of_npm = (
        "as configured" if given else f"as this host's own {name}"
        for given, name in ((config.packages.pypi, "pip"), (config.packages.npm, "npm"))
    )
    return f"on: pip and uv install from {pypi} ({of_pip}), npm from {npm} ({of_npm})"


def _hosts(urls: Iterable[str]) -> str:
    """Names only: a URL may have more in it that is nobody's business."""
    return ", ".join(dict.fromkeys(urlsplit(url).hostname or "" for url in urls)) or "nowhere"


def _secrets() -> Check:
    """A broken build of it fails at its first use, so it is used."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ec

        ec.generate_private_key(ec.SECP256R1())
    except (ImportError, OSError) as error:
        advice = "install the package cryptography: without it sandboxes with secrets are refused"
        return Check(name="secrets", state="missing", detail=f"cryptography cannot be used: {error}", advice=advice)
    return Check(name="secrets", state="enforced", detail=f"cryptography {version('cryptography')}")
