"""What pip, uv and npm find in a sandbox: where they install to, and where packages come from.

The template is read-only. What is installed goes to one directory of the sandbox's own, `USER_BASE`, for `user` and for
root, and comes before what the template has. Settings are in the files of least weight, so that a program's own win.
"""

from __future__ import annotations

import contextlib
import py_compile
import sys
from importlib.util import cache_from_source
from pathlib import Path

from uv import find_uv_bin

from cloche import errors
from cloche.guest.paths import DOOR_PORT, USER_BASE
from cloche.model import Template

DOOR = f"http://127.0.0.1:{DOOR_PORT}"
SITE = "opt/cloche/site"  # what stands in the place of the host's own site-packages
UV = "opt/cloche/uv"

_GUEST = Path(__file__).parent.parent / "guest"
_PROGRAMS = ("uv.py", "installing.py", "python_client.py")
_OWN_UV = 'import sys; sys.path.insert(0, "/opt/cloche/lib"); from cloche.guest.uv import main; main()'
_RUN_OWN_UV = f"exec /opt/cloche/env/bin/python -ISc '{_OWN_UV}'"
_RUN_UV = f"exec /{UV}"
ENVIRONMENT = {
    "PYTHONUSERBASE": USER_BASE,
    "NPM_CONFIG_GLOBALCONFIG": "/etc/npmrc",
    "NODE_USE_SYSTEM_CA": "1",  # certificates are the host's, as for all other programs
    "UV_SYSTEM_CERTS": "true",
    "WATCHFILES_FORCE_POLLING": "true",  # it would watch for openings, which is not to be had: see policy/cell.toml
}
# An interpreter that is called by its bare name (an embedded one is) takes the first `python3` on the PATH for itself,
# and looks for its packages from there. That one is ours: around it is an environment, whose `lib` is the template's.
FRONT = "opt/cloche/front"
# In the template's own environment only: others are made inside, and work as anywhere.
_PTH = f'import sys; sys.prefix in ("/opt/cloche/env", "/{FRONT}") and __import__("cloche_usersite")\n'
_PIP = {
    "global": {"disable-pip-version-check": "true", "no-cache-dir": "true", "root-user-action": "ignore"},
    "install": {"compile": "false"},  # it takes a third of the time; what is imported is compiled then
}
_UV = {
    "cache-dir": '"/home/user/.cache/uv"',  # from where files can be linked
    "python-downloads": '"never"',
}
# Read where a sandbox has a network: see engine/trust.py. Else there need be no such certificates.
_WGET = "ca_certificate = /run/cloche/ca.pem\n"
_NPM = {"prefix": USER_BASE, "audit": "false", "fund": "false", "update-notifier": "false"}


def files(template: Template, *, packages: bool) -> dict[str, str]:
    """Paths in the root, and what they hold. `packages`: whether the host's index is behind the door."""
    return {
        f"{SITE}/cloche.pth": _PTH,
        f"{SITE}/cloche_usersite.py": (_GUEST / "usersite.py").read_text("utf-8"),
        f"{SITE}/cloche_show.py": (_GUEST / "show.py").read_text("utf-8"),
        f"{SITE}.cfg": _environment_settings(template),
        f"{FRONT}/pyvenv.cfg": _environment_settings(template),
        "etc/pip.conf": _pip(packages),
        "etc/uv/uv.toml": _uv(packages),
        "etc/npmrc": _npm(packages),
        "etc/cloche-wgetrc": _WGET,
    }


def compile_programs(template: Template) -> None:
    """Programs of ours start in every sandbox, where their bytecode cannot be kept. Where we have the same Python and
    may write to the package, it is kept beside them, as Python does for all that it imports."""
    if template.python_version.split(".")[:2] == [str(number) for number in sys.version_info[:2]]:
        for source in (_GUEST / name for name in _PROGRAMS):
            with contextlib.suppress(OSError):
                if not _is_compiled(source):
                    py_compile.compile(str(source), quiet=2)


def _is_compiled(source: Path) -> bool:
    kept = Path(cache_from_source(str(source)))
    return kept.exists() and kept.stat().st_mtime >= source.stat().st_mtime


def programs(packages: bool) -> dict[str, str]:
    """uv by its names. Its `pip` has nowhere to install to, and without an index it has to say why: guest/uv.py."""
    if not packages:
        return {"uv": _script(f'{_RUN_OWN_UV} "$@"'), "uvx": _script(f'{_RUN_OWN_UV} tool run "$@"')}
    pip = f'case " $* " in *" pip "*) {_RUN_OWN_UV} "$@" ;; esac'
    return {"uv": _script(pip, f'{_RUN_UV} "$@"'), "uvx": _script(f'{_RUN_UV} tool run "$@"')}


def _script(*lines: str) -> str:
    return "\n".join(["#!/bin/sh", *lines, ""])


def covers() -> dict[str, str]:
    """Files of the template that others of the root lie over."""
    return {"opt/cloche/env/pyvenv.cfg": f"{SITE}.cfg"}


def binds() -> list[tuple[str, str]]:
    try:
        return [(find_uv_bin(), UV)]
    except FileNotFoundError:
        return []  # templates cannot be built then, but sandboxes run


def _environment_settings(template: Template) -> str:
    """As if the environment showed the system's packages: only then is the user's site-packages looked at.

    Raises NurseryFailed.
    """
    try:
        lines = Path(template.root, "env", "pyvenv.cfg").read_text("utf-8").splitlines()
    except OSError as error:
        raise errors.NurseryFailed(f"the environment of {template.ref} is damaged: {error}") from None
    kept = [line for line in lines if not line.startswith("include-system-site-packages")]
    return "\n".join([*kept, "include-system-site-packages = true", ""])


def _pip(packages: bool) -> str:
    index = {"index-url": f"{DOOR}/pypi/simple/"} if packages else {}
    tables = {**_PIP, "global": {**_PIP["global"], **index}}
    return "\n".join(f"[{name}]\n{_assignments(table)}" for name, table in tables.items())


def _uv(packages: bool) -> str:
    index = f'[[index]]\nname = "host"\nurl = "{DOOR}/pypi/simple/"\ndefault = true\n' if packages else ""
    return _assignments(_UV) + index


def _npm(packages: bool) -> str:
    return _assignments({**_NPM, **({"registry": f"{DOOR}/npm/"} if packages else {})})


def _assignments(table: dict[str, str]) -> str:
    return "".join(f"{key} = {value}\n" for key, value in table.items())
