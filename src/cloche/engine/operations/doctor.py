"""What this host can isolate and limit, how, and what to do where it cannot: for `cloche doctor`, and for the console.

It must work when nothing else does: whatever a part of it meets becomes a line of its report.
"""

from __future__ import annotations

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
from cloche.isolation.base import Check
from cloche.model import GIB, Struct

NEEDED = frozenset(
    {"platform", "kernel", "namespaces", "seccomp", "trial", "configuration", "data directory", "Python"}
)
"""Without these there is no sandbox. All else makes it stronger, faster or easier."""

TRIAL_SECONDS = 30
COMFORTABLE_BYTES = 2 * GIB
_TRIAL = """
from cloche.linux import namespaces as n, syscalls
syscalls.unshare(n.NEWUSER | n.NEWNS | n.NEWPID | n.NEWNET | n.NEWIPC | n.NEWUTS)
syscalls.set_hostname("trial")
"""


class Section(Struct):
    title: str
    checks: list[Check]


def examine(config: Config, wrong: Sequence[Check] = (), more: Sequence[Section] = ()) -> list[Section]:
    """Everything that can be said without making a sandbox. Never raises for what it finds. Takes seconds: in a thread.

    `wrong` is what is known already to be, of the configuration; `more` is what others examined.
    """
    return [
        Section(title=f"Isolation and limits (backend {config.backend})", checks=_isolation(config)),
        Section(title="Python interpreters", checks=attempt("Python", _pythons)),
        Section(title="Templates", checks=attempt("templates", lambda: _templates(config))),
        Section(title="Networks of sandboxes", checks=attempt("network", lambda: _networks(config))),
        *more,
        Section(title="Places", checks=[*wrong, *attempt("data directory", lambda: _places(config))]),
        Section(title="Leftovers", checks=attempt("leftovers", lambda: _leftovers(config))),
    ]


def missing_in(sections: Sequence[Section]) -> list[str]:
    """What is missing without which there is no sandbox."""
    found = (each for part in sections for each in part.checks)
    return [each.name for each in found if each.state == "missing" and each.name in NEEDED]


def attempt(name: str, produce: Callable[[], Iterable[Check]]) -> list[Check]:
    """What `produce` finds; what stops it, as a line of the report."""
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
        return [Check(name=name, state="missing", detail=f"could not be examined: {type(error).__name__}: {error}")]


def _isolation(config: Config) -> list[Check]:
    if config.backend != "namespaces":
        return [Check(name="walls", state="missing", detail=f"{config.backend} has none", advice="use namespaces")]
    refused = attempt("platform", _platform)
    return refused or [*attempt("kernel", _probe), *attempt("trial", _trial)]


def _platform() -> Iterable[Check]:
    from cloche.isolation.probe import refuse_unless_possible

    try:
        refuse_unless_possible()
    except errors.IsolationUnavailable as error:
        yield Check(name="platform", state="missing", detail=str(error))


def _probe() -> list[Check]:
    from cloche.isolation.probe import checks

    return checks()


def _trial() -> Iterable[Check]:
    """Settings may allow what a container's seccomp profile or AppArmor then refuse: so it is tried."""
    command = [sys.executable, "-I", "-c", _TRIAL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False)
    if done.returncode == 0:
        yield Check(name="trial", state="enforced", detail="namespaces were made, with rights inside them")
        return
    why = done.stderr.strip().rpartition("\n")[2] or f"status {done.returncode}"
    advice = "inside a container, let its seccomp and AppArmor profiles allow unshare and mount; or see `namespaces`"
    yield Check(name="trial", state="missing", detail=f"namespaces cannot be made: {why}", advice=advice)


def _pythons() -> Iterable[Check]:
    from cloche.templates import pythons

    found = list(pythons.find())
    for each in found:
        yield Check(name=f"Python {each.version}", state="enforced", detail=each.path)
    if not found:
        advice = "install Python 3.10 or newer (`uv python install` does)"
        yield Check(name="Python", state="missing", detail="none that a template can be built on", advice=advice)


def _templates(config: Config) -> Iterable[Check]:
    from cloche.templates import Catalogue

    built = Catalogue(config.data_dir, config.aliases).list()
    for each in built:
        detail = f"Python {each.python_version}, {len(each.packages)} packages"
        usable = os.access(each.python, os.X_OK)
        advice = "" if usable else f"its interpreter is gone ({each.python}): build it again"
        yield Check(name=each.ref, state="enforced" if usable else "missing", detail=detail, advice=advice)
    if not any(each.name == "python" for each in built):
        advice = "the first sandbox builds it; or do it now: cloche template build python"
        yield Check(name="python", state="best effort", detail="not built yet", advice=advice)


def _networks(config: Config) -> Iterable[Check]:

    return network_checks(config)


def _places(config: Config) -> Iterable[Check]:
    there = _nearest(Path(config.data_dir))
    writable = _can_write(there)
    detail = config.data_dir if there == Path(config.data_dir) else f"{config.data_dir} (not there yet)"
    advice = "" if writable else f"{there} cannot be written: set CLOCHE_DATA_DIR, or mend its rights"
    yield Check(name="data directory", state="enforced" if writable else "missing", detail=detail, advice=advice)
    free = shutil.disk_usage(there).free
    enough = free >= COMFORTABLE_BYTES
    yield Check(
        name="disk space",
        state="enforced" if enough else "best effort",
        detail=f"{free / GIB:.1f} GiB free",
        advice="" if enough else "a template takes about 1 GiB: make room, or set CLOCHE_DATA_DIR",
    )


def _leftovers(config: Config) -> Iterable[Check]:

    return leftover_checks(config)


def _can_write(directory: Path) -> bool:
    """Tried, since rights alone do not tell: root has them all, also on a read-only file system."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _nearest(path: Path) -> Path:
    """The directory itself, or the nearest one above it that exists."""
    return next((each for each in (path, *path.parents) if each.is_dir()), Path("/"))


# What `cloche doctor` says of processes that died: what of theirs is left until Cloche is started again.

LEFTOVERS_SHOWN = 5  # of each kind


def leftover_checks(config: Config) -> Iterable[Check]:
    """Only looks."""
    found = [
        part for part in (_cgroups(config), _instances(config), _images(config), _template_leftovers(config)) if part
    ]
    if not found:
        yield Check(name="leftovers", state="enforced", detail="nothing of processes that died")
        return
    advice = "whatever starts Cloche next (`cloche serve`, `cloche run`) removes it"
    yield Check(name="leftovers", state="best effort", detail="; ".join(found), advice=advice)


def _instances(config: Config) -> str:
    from cloche.engine.instance import dead_instances

    return _shorten_names("directories of", dead_instances(Path(config.data_dir, "run")))


def _cgroups(config: Config) -> str:
    """Perhaps with processes in them that are frozen, and could not die with the one that froze them."""
    from cloche.linux.cgroups import probe

    return _shorten_names("cgroups of", probe().dead()) if config.backend == "namespaces" else ""


def _images(config: Config) -> str:
    from cloche.engine.instance import Instance
    from cloche.store.images import abandoned_drafts

    is_live = Instance(Path(config.data_dir, "run")).is_live
    return _shorten_names("half-written images", abandoned_drafts(Path(config.data_dir, "images"), is_live))


def _template_leftovers(config: Config) -> str:
    from cloche.templates import Catalogue

    found = [f"{path.parent.name}/{path.name}" for path in Catalogue(config.data_dir, config.aliases).abandoned()]
    return _shorten_names("half-built templates", found)


def _shorten_names(what: str, names: list[str]) -> str:
    more = f" and {len(names) - LEFTOVERS_SHOWN} more" if len(names) > LEFTOVERS_SHOWN else ""
    return f"{what} {', '.join(names[:LEFTOVERS_SHOWN])}{more}" if names else ""


# What `cloche doctor` says of networks: who may reach what, where packages come from, whether secrets can be used.

NETWORKS_SHOWN = 8  # patterns of a long list


def network_checks(config: Config) -> Iterable[Check]:
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
    parts = [f"sandboxes of a server may be allowed {_shorten_patterns(network.allow)}"]
    if network.deny:
        parts.append(f"never {_shorten_patterns(network.deny)}")
    if network.internal:
        parts.append(f"of private addresses {_shorten_patterns(network.internal)}")
    default = _shorten_patterns(network.default) if network.default else "nothing"
    # The products that those clients are of have the internet open unless it is closed.
    parts.append(f"who does not ask gets {default}, and clients of E2B and OpenSandbox that do not ask get all of it")
    return "; ".join(parts)


def _shorten_patterns(patterns: tuple[str, ...]) -> str:
    more = f" and {len(patterns) - NETWORKS_SHOWN} more" if len(patterns) > NETWORKS_SHOWN else ""
    return ", ".join(patterns[:NETWORKS_SHOWN]) + more


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
