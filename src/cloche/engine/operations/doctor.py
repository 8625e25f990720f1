"""The checks of `cloche doctor` and of the console: isolation, limits and files of this host, with advice.

It must work when nothing else does: any failure of a check becomes a line of its report.
"""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from cloche import errors
from cloche.config import Config
from cloche.isolation.base import HostCheck
from cloche.model import GIB, Struct

REQUIRED_CHECKS = frozenset(
    {"platform", "kernel", "namespaces", "seccomp", "trial", "runsc", "configuration", "data directory", "Python"}
)
"""Without these there is no sandbox. All else makes it stronger, faster or easier."""

TRIAL_SECONDS = 30
ENOUGH_DISK_BYTES = 2 * GIB
_TRIAL_PROGRAM = """
from cloche.linux import namespaces as n, syscalls
syscalls.unshare(n.NEWUSER | n.NEWNS | n.NEWPID | n.NEWNET | n.NEWIPC | n.NEWUTS)
syscalls.set_hostname("trial")
"""


class CheckupSection(Struct):
    title: str
    checks: list[HostCheck]


def run_checkup(
    config: Config, wrong: Sequence[HostCheck] = (), more: Sequence[CheckupSection] = ()
) -> list[CheckupSection]:
    """All checks that need no sandbox. Never raises for a finding. Takes seconds: call it in a thread.

    `wrong`: known problems of the configuration; `more`: sections of other examiners.
    """
    return [
        CheckupSection(title=f"Isolation and limits (backend {config.backend})", checks=_check_isolation(config)),
        CheckupSection(title="Python interpreters", checks=collect_checks("Python", _check_pythons)),
        CheckupSection(title="Templates", checks=collect_checks("templates", lambda: _check_templates(config))),
        CheckupSection(
            title="Networks of sandboxes", checks=collect_checks("network", lambda: _check_networks(config))
        ),
        *more,
        CheckupSection(
            title="Places", checks=[*wrong, *collect_checks("data directory", lambda: _check_data_directory(config))]
        ),
        CheckupSection(title="Leftovers", checks=collect_checks("leftovers", lambda: _check_leftovers(config))),
    ]


def missing_requirements(sections: Sequence[CheckupSection]) -> list[str]:
    """The names of missing checks without which no sandbox can run."""
    found = (each for part in sections for each in part.checks)
    return [each.name for each in found if each.state == "missing" and each.name in REQUIRED_CHECKS]


def collect_checks(name: str, produce: Callable[[], Iterable[HostCheck]]) -> list[HostCheck]:
    """The checks of `produce`; if it fails, the failure as a check."""
    try:
        return list(produce())
    except (
        errors.ClocheError,
        OSError,
        ArithmeticError,
        AttributeError,
        ImportError,
        LookupError,
        ValueError,
    ) as error:
        return [HostCheck(name=name, state="missing", detail=f"could not be examined: {type(error).__name__}: {error}")]


def _check_isolation(config: Config) -> list[HostCheck]:
    if config.backend == "plain-unsafe":
        return [HostCheck(name="walls", state="missing", detail=f"{config.backend} has none", advice="use namespaces")]
    if config.backend == "gvisor":
        return [*collect_checks("runsc", _check_runsc), *collect_checks("kernel", _probe_kernel)]
    refused = collect_checks("platform", _check_platform)
    return refused or [*collect_checks("kernel", _probe_kernel), *collect_checks("trial", _try_namespaces)]


def _check_platform() -> Iterable[HostCheck]:
    from cloche.isolation.probe import refuse_unless_possible

    try:
        refuse_unless_possible()
    except errors.IsolationUnavailable as error:
        yield HostCheck(name="platform", state="missing", detail=str(error))


def _probe_kernel() -> list[HostCheck]:
    from cloche.isolation.probe import host_checks

    return host_checks()


def _check_runsc() -> Iterable[HostCheck]:
    from cloche.isolation.runsc import check_runsc

    yield check_runsc(datetime.date.today())


def _try_namespaces() -> Iterable[HostCheck]:
    """Makes namespaces: a container's seccomp profile or AppArmor may refuse what settings allow."""
    command = [sys.executable, "-I", "-c", _TRIAL_PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False)
    if done.returncode == 0:
        yield HostCheck(name="trial", state="enforced", detail="namespaces were made, with rights inside them")
        return
    why = done.stderr.strip().rpartition("\n")[2] or f"status {done.returncode}"
    advice = "inside a container, let its seccomp and AppArmor profiles allow unshare and mount; or see `namespaces`"
    yield HostCheck(name="trial", state="missing", detail=f"namespaces cannot be made: {why}", advice=advice)


def _check_pythons() -> Iterable[HostCheck]:
    from cloche.templates import pythons

    found = list(pythons.find_interpreters())
    for each in found:
        yield HostCheck(name=f"Python {each.version}", state="enforced", detail=each.path)
    if not found:
        advice = "install Python 3.10 or newer (`uv python install` does)"
        yield HostCheck(name="Python", state="missing", detail="none that a template can be built on", advice=advice)


def _check_templates(config: Config) -> Iterable[HostCheck]:
    from cloche.templates import Catalogue

    built = Catalogue(config.data_dir, config.aliases).list()
    for each in built:
        detail = f"Python {each.python_version}, {len(each.packages)} packages"
        usable = os.access(each.python, os.X_OK)
        advice = "" if usable else f"its interpreter is gone ({each.python}): build it again"
        yield HostCheck(name=each.ref, state="enforced" if usable else "missing", detail=detail, advice=advice)
    if not any(each.name == "python" for each in built):
        advice = "the first sandbox builds it; or do it now: cloche template build python"
        yield HostCheck(name="python", state="best effort", detail="not built yet", advice=advice)


def _check_networks(config: Config) -> Iterable[HostCheck]:

    return network_checks(config)


def _check_data_directory(config: Config) -> Iterable[HostCheck]:
    there = _nearest_existing(Path(config.data_dir))
    writable = _is_writable_directory(there)
    detail = config.data_dir if there == Path(config.data_dir) else f"{config.data_dir} (not there yet)"
    advice = "" if writable else f"{there} cannot be written: set CLOCHE_DATA_DIR, or mend its rights"
    yield HostCheck(name="data directory", state="enforced" if writable else "missing", detail=detail, advice=advice)
    free = shutil.disk_usage(there).free
    enough = free >= ENOUGH_DISK_BYTES
    yield HostCheck(
        name="disk space",
        state="enforced" if enough else "best effort",
        detail=f"{free / GIB:.1f} GiB free",
        advice="" if enough else "a template takes about 1 GiB: make room, or set CLOCHE_DATA_DIR",
    )


def _check_leftovers(config: Config) -> Iterable[HostCheck]:

    return leftover_checks(config)


def _is_writable_directory(directory: Path) -> bool:
    """Tries it, since rights alone do not tell: root has them all, also on a read-only file system."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest one above it that exists."""
    return next((each for each in (path, *path.parents) if each.exists()), Path("/"))


# Checks of `cloche doctor` for leftovers of processes that died; the next start of Cloche removes them.

MAX_LEFTOVERS_SHOWN = 5  # of each kind


def leftover_checks(config: Config) -> Iterable[HostCheck]:
    """Changes nothing."""
    found = [
        part
        for part in (
            _describe_dead_cgroups(config),
            _describe_dead_instances(config),
            _describe_abandoned_images(config),
            _describe_abandoned_templates(config),
        )
        if part
    ]
    if not found:
        yield HostCheck(name="leftovers", state="enforced", detail="nothing of processes that died")
        return
    advice = "the next start of Cloche (`cloche serve`, `cloche run`) removes it"
    yield HostCheck(name="leftovers", state="best effort", detail="; ".join(found), advice=advice)


def _describe_dead_instances(config: Config) -> str:
    from cloche.engine.instance import dead_instances

    return _shorten_names("directories of", dead_instances(Path(config.data_dir, "run")))


def _describe_dead_cgroups(config: Config) -> str:
    """Cgroups of dead processes. They may hold frozen processes, which could not die with their host process."""
    from cloche.linux.cgroups import probe_cgroups

    return _shorten_names("cgroups of", probe_cgroups().dead_instances()) if config.backend == "namespaces" else ""


def _describe_abandoned_images(config: Config) -> str:
    from cloche.engine.instance import Instance
    from cloche.store.images import abandoned_drafts

    is_live = Instance(Path(config.data_dir, "run")).is_live
    return _shorten_names("half-written images", abandoned_drafts(Path(config.data_dir, "images"), is_live))


def _describe_abandoned_templates(config: Config) -> str:
    from cloche.templates import Catalogue

    found = [f"{path.parent.name}/{path.name}" for path in Catalogue(config.data_dir, config.aliases).find_abandoned()]
    return _shorten_names("half-built templates", found)


def _shorten_names(what: str, names: list[str]) -> str:
    more = f" and {len(names) - MAX_LEFTOVERS_SHOWN} more" if len(names) > MAX_LEFTOVERS_SHOWN else ""
    return f"{what} {', '.join(names[:MAX_LEFTOVERS_SHOWN])}{more}" if names else ""


# Checks of `cloche doctor` for networks: the policy, the sources of packages, and secrets.

MAX_PATTERNS_SHOWN = 8  # patterns of a long list


def network_checks(config: Config) -> Iterable[HostCheck]:
    """Raises as reading the host's own configuration of pip and npm does."""
    if config.backend != "namespaces":
        detail = f"{config.backend} has no walls: programs use this host's own network, and policies are refused"
        yield HostCheck(name="policy", state="missing", detail=detail, advice="use namespaces")
        return
    yield HostCheck(name="policy", state="enforced", detail=_describe_policy(config))
    yield HostCheck(name="packages", state="enforced", detail=_describe_package_sources(config))
    yield _check_cryptography()


def _describe_policy(config: Config) -> str:
    network = config.network
    if not network.allow:
        return "sandboxes of a server reach nothing but their own loopback (network.allow is empty)"
    parts = [f"sandboxes of a server may be allowed {_shorten_patterns(network.allow)}"]
    if network.deny:
        parts.append(f"never {_shorten_patterns(network.deny)}")
    if network.internal:
        parts.append(f"of private addresses {_shorten_patterns(network.internal)}")
    default = _shorten_patterns(network.default) if network.default else "nothing"
    # The products that those clients are of have the internet open unless it is closed.
    parts.append(f"a client without a policy gets {default}, and one of E2B or OpenSandbox gets all of it")
    return "; ".join(parts)


def _shorten_patterns(patterns: tuple[str, ...]) -> str:
    more = f" and {len(patterns) - MAX_PATTERNS_SHOWN} more" if len(patterns) > MAX_PATTERNS_SHOWN else ""
    return ", ".join(patterns[:MAX_PATTERNS_SHOWN]) + more


def _describe_package_sources(config: Config) -> str:
    if not config.packages.enabled:
        return "off: pip, uv and npm in sandboxes install nothing (packages.enabled)"
    from cloche.egress.packages.sources import read_sources

    sources = read_sources(config.packages)
    pypi, npm = (_join_host_names(urls) for urls in (sources.pypi, (sources.npm, *sources.npm_scopes.values())))
    of_pip, of_npm = (
        "as configured" if given else f"as this host's own {name}"
        for given, name in ((config.packages.pypi, "pip"), (config.packages.npm, "npm"))
    )
    return f"on: pip and uv install from {pypi} ({of_pip}), npm from {npm} ({of_npm})"


def _join_host_names(urls: Iterable[str]) -> str:
    """Host names only: the rest of a URL may be confidential."""
    return ", ".join(dict.fromkeys(urlsplit(url).hostname or "" for url in urls)) or "nowhere"


def _check_cryptography() -> HostCheck:
    """Uses the package, since a broken build of it fails only at its first use."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ec

        ec.generate_private_key(ec.SECP256R1())
    except (ImportError, OSError) as error:
        advice = "install the package cryptography: without it sandboxes with secrets are refused"
        return HostCheck(name="secrets", state="missing", detail=f"cryptography cannot be used: {error}", advice=advice)
    return HostCheck(name="secrets", state="enforced", detail=f"cryptography {version('cryptography')}")
