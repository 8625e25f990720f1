"""What a sandbox sees of the file system: a plan, made by the host, carried out by `launch`.

The host's /usr is shared read-only, /etc is our own, and beside the template's environment and its Python's prefix
nothing else of the host is visible.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path

from cloche.isolation import installers
from cloche.model import Struct, Template

PYTHON = "/opt/cloche/python"
ENV = "/opt/cloche/env"
LIB = "/opt/cloche/lib"
SHARED = "/opt/cloche/shared"
PROGRAMS = "/opt/cloche/programs"
FRONT = "/opt/cloche/front"  # programs of ours that come before those of the template; see installers.py

# Places of the host's /etc that programs below /usr need, and that hold nothing of the host's own.
_ETC_SHARED = (
    "alternatives",  # /usr/bin/awk and others are links through it
    "ld.so.cache",  # where libraries are
    "ssl/certs",  # public certificates
    "ca-certificates",
    "fonts",
    "mime.types",
    "services",
    "protocols",
)
_ETC_SHARED_GLOBS = ("java-*-openjdk",)

_ETC_OWN = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\n"
    "user:x:1000:1000:user:/home/user:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost cloche\n::1 localhost\n",
    "hostname": "cloche\n",
    "resolv.conf": "# no network\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
    "shells": "/bin/sh\n/bin/bash\n",
    # It must leave PATH as it is: commands of E2B's clients run in login shells.
    "profile": '# the environment is set by Cloche\ncase $- in *i*) [ -z "$BASH" ] || . /etc/bash.bashrc ;; esac\n',
    "bash.bashrc": "PS1='\\u@\\h:\\w\\$ '\n",
}
# Programs of ours, before the host's on the PATH: its own sudo can only fail here. See guest/elevation.py.
_SUDO = f'import sys; sys.path.insert(0, "{LIB}"); from cloche.guest.sudo import main; main()'
_PROGRAMS = {"sudo": f"#!/bin/sh\nexec {ENV}/bin/python -ISc '{_SUDO}' \"$@\"\n"}
# See guest/warm_python.py. No shell in between, and no package: it is in the way of every start of Python.
_WARM_PYTHON = f"""#!{ENV}/bin/python3 -IS
import sys
sys.path.insert(0, "{LIB}/cloche/guest")
from python_client import main
main()
"""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DIRECTORIES = (
    "proc",
    "sys",
    "dev/pts",
    "dev/shm",
    "home/user",
    "mnt/data",
    "app",
    "tmp",
    "var/tmp",
    "run",
    "root",
    "opt/cloche/cell",
)


_PREFIX_PARTS = ("bin", "lib", "lib64", "include", "share")  # of a Python's prefix; beside them may lie anything


class Plan(Struct):
    """Directories, files, links and read-only binds that make a nursery's root. Paths inside are relative to it."""

    directories: list[str]
    files: dict[str, str]
    programs: dict[str, str]  # files that can be executed
    links: dict[str, str]
    binds: list[tuple[str, str]]
    covers: dict[str, str]  # what lies over what is there: path -> another path of the root
    devices: list[str]


def plan(template: Template, *, packages: bool = False) -> Plan:
    """The root for nurseries of `template` on this host. `packages`: whether sandboxes have a package index."""
    links = {"dev/fd": "/proc/self/fd", "dev/stdin": "/proc/self/fd/0", "dev/stdout": "/proc/self/fd/1"}
    links |= {"dev/stderr": "/proc/self/fd/2", "dev/ptmx": "pts/ptmx", "etc/mtab": "/proc/self/mounts"}
    links |= {"etc/os-release": "../usr/lib/os-release", "etc/localtime": "/usr/share/zoneinfo/Etc/UTC"}
    links[f"{FRONT[1:]}/lib"] = f"{ENV}/lib"
    binds = [("/usr", "usr"), *_system_directories(links), *_etc_binds()]
    binds += [(f"{template.root}/env", ENV[1:]), *_guest_code(), *installers.binds()]
    binds += _prefix(template, links)
    return Plan(
        directories=[*_DIRECTORIES, *(["opt/cloche/warm"] if packages else [])],
        files={f"etc/{name}": text for name, text in _ETC_OWN.items()} | installers.files(template, packages=packages),
        programs=_programs(template, packages),
        links=links,
        binds=binds,
        covers=dict.fromkeys(_site_packages(template), installers.SITE) | installers.covers(),
        devices=[f"/dev/{name}" for name in _DEVICES],
    )


def _programs(template: Template, packages: bool) -> dict[str, str]:
    minor = ".".join(template.python_version.split(".")[:2])
    pythons = {f"{FRONT[1:]}/bin/{name}": _WARM_PYTHON for name in ("python", "python3", f"python{minor}")}
    return pythons | {
        f"{PROGRAMS[1:]}/{name}": text for name, text in (_PROGRAMS | installers.programs(packages)).items()
    }


def _system_directories(links: dict[str, str]) -> list[tuple[str, str]]:
    """/bin, /lib and so on: links where the host has merged them into /usr, binds where it has not."""
    binds = []
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = f"/{name}"
        if os.path.islink(path):
            links[name] = os.readlink(path)
        elif os.path.isdir(path):
            binds.append((path, name))
    return binds


def _etc_binds() -> list[tuple[str, str]]:
    names = [*_ETC_SHARED, *(found for pattern in _ETC_SHARED_GLOBS for found in glob.glob(pattern, root_dir="/etc"))]
    return [(f"/etc/{name}", f"etc/{name}") for name in names if os.path.exists(f"/etc/{name}")]


def _guest_code() -> list[tuple[str, str]]:
    package = Path(__file__).parent.parent
    return [(str(package / name), f"{LIB[1:]}/cloche/{name}") for name in ("guest", "linux")]


def _below_usr(prefix: str) -> bool:
    return prefix == "/usr" or prefix.startswith("/usr/")


def _prefix(template: Template, links: dict[str, str]) -> list[tuple[str, str]]:
    prefix = os.path.realpath(template.python_prefix)
    if _below_usr(prefix):
        links[PYTHON[1:]] = prefix
        return []
    parts = [name for name in _PREFIX_PARTS if os.path.isdir(f"{prefix}/{name}")]
    return [*((f"{prefix}/{name}", f"{PYTHON[1:]}/{name}") for name in parts), *_shared_libraries(prefix)]


def environment(template: Template) -> dict[str, str]:
    """What programs need in their environment to find this root's parts."""
    shared = _shared_libraries(os.path.realpath(template.python_prefix))
    return {**installers.ENVIRONMENT, **({"LD_LIBRARY_PATH": SHARED} if shared else {})}


def _shared_libraries(prefix: str) -> list[tuple[str, str]]:
    """The prefix's libpython, alone in a directory of its own.

    An interpreter that was built with a shared library looks for it where the prefix was on the host, which is not
    there inside. It would not start, or run on the system's library of another version than its modules. The whole
    lib directory in LD_LIBRARY_PATH would replace the system's libraries for every program.
    """
    if _below_usr(prefix):
        return []
    names = glob.glob("libpython3*.so.1.0", root_dir=f"{prefix}/lib")
    return [(f"{prefix}/lib/{name}", f"{SHARED[1:]}/{name}") for name in names]


def _site_packages(template: Template) -> list[str]:
    """Directories of the host's own Python packages: they are covered."""
    libraries = ("usr/lib", "usr/lib64", "usr/local/lib", "usr/local/lib64")
    patterns = [f"{library}/python3*/{kind}-packages" for library in libraries for kind in ("dist", "site")]
    found = [path for pattern in patterns for path in glob.glob(pattern, root_dir="/")]
    prefix = os.path.realpath(template.python_prefix)
    if not _below_usr(prefix):
        inside = glob.glob("lib*/python3*/site-packages", root_dir=prefix)
        found += [f"{PYTHON[1:]}/{path}" for path in inside]
    return sorted(set(found))
