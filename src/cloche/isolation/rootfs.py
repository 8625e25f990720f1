"""The file system of a sandbox: a plan, made by the host, carried out by `launch`.

The host's /usr is shared read-only, /etc is our own, and beside the template's environment and its Python's
prefix nothing else of the host is visible. With an imported image, the image's files are in place of the host's.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import py_compile
import sys
from importlib.util import cache_from_source
from pathlib import Path

from uv import find_uv_bin

from cloche import errors
from cloche.guest.paths import DOOR_PORT, USER_BASE
from cloche.image_layout import (
    ETC_DIRECTORY,
    IMAGE_DIRECTORY,
    LOADER_COPY,
    MERGED_DIRECTORIES,
    PRIVATE_LIBRARIES,
    PRIVATE_LOADER,
    SHARED_DIRECTORY,
    SITE_FILE,
    SYSTEM_DIRECTORIES,
)
from cloche.model import ImageOrigin, Struct, Template

# The settings of pip, uv and npm in a sandbox: where they install to, and where packages come from.
#
# The template is read-only. Packages are installed to one directory of the sandbox's own, `USER_BASE`, for
# `user` and for root, which comes before the template's. Settings are in the files of least weight, so that a
# program's own win.

DOOR_URL = f"http://127.0.0.1:{DOOR_PORT}"
SITE_PATH = "opt/cloche/site"  # replaces the host's own site-packages
UV_PATH = "opt/cloche/uv"

_GUEST = Path(__file__).parent.parent / "guest"
_COMPILED_PROGRAMS = ("bin/uv.py", "python/installers.py", "python/client.py")
_OWN_UV = 'import sys; sys.path.insert(0, "/opt/cloche/lib"); from cloche.guest.bin.uv import main; main()'
_RUN_OWN_UV = f"exec /opt/cloche/env/bin/python -ISc '{_OWN_UV}'"
_RUN_UV = f"exec /{UV_PATH}"
INSTALLER_ENVIRONMENT = {
    "PYTHONUSERBASE": USER_BASE,
    "NPM_CONFIG_GLOBALCONFIG": "/etc/npmrc",
    "NODE_USE_SYSTEM_CA": "1",  # certificates are the host's, as for all other programs
    "UV_SYSTEM_CERTS": "true",
    "WATCHFILES_FORCE_POLLING": "true",  # it would watch for openings, which is not to be had: see policy/cell.toml
}
# An interpreter that is called by its bare name (an embedded one is) takes the first `python3` on the PATH for itself,
# and looks for its packages from there. That one is ours: around it is an environment with the template's `lib`.
FRONT_PATH = "opt/cloche/front"
# In the template's own environment only: others are made inside, and work as anywhere.
_PTH = f'import sys; sys.prefix in ("/opt/cloche/env", "/{FRONT_PATH}") and __import__("cloche_usersite")\n'
# The same for an image's own Python, whose packages stay: it lies in the environment, which is read first, and again
# when it is known whether there is a user's site-packages.
_IMAGE_PTH = f"/{SITE_PATH}\nimport site; site.ENABLE_USER_SITE is not None and exec({_PTH!r})\n"
_PIP = {
    "global": {"disable-pip-version-check": "true", "no-cache-dir": "true", "root-user-action": "ignore"},
    "install": {"compile": "false"},  # it takes a third of the time; modules are compiled when they are imported
}
_UV = {
    "cache-dir": '"/home/user/.cache/uv"',  # from where files can be linked
    "python-downloads": '"never"',
}
# Read where a sandbox has a network: see engine/sandboxes/network.py. Else there need be no such certificates.
_WGET = "ca_certificate = /run/cloche/ca.pem\n"
_NPM = {"prefix": USER_BASE, "audit": "false", "fund": "false", "update-notifier": "false"}


def installer_files(template: Template, *, packages: bool) -> dict[str, str]:
    """Files of the root by path. `packages`: whether the host's package index is served to the sandbox."""
    return {
        f"{SITE_PATH}/cloche.pth": _PTH,
        f"{SITE_PATH}/cloche_usersite.py": (_GUEST / "python" / "usersite.py").read_text("utf-8"),
        f"{SITE_PATH}/cloche_show.py": (_GUEST / "kernel" / "pyplot_files_backend.py").read_text("utf-8"),
        f"{SITE_PATH}.cfg": _environment_settings(template),
        f"{FRONT_PATH}/pyvenv.cfg": _environment_settings(template),
        "etc/pip.conf": _pip_config(packages),
        "etc/uv/uv.toml": _uv_config(packages),
        "etc/npmrc": _npm_config(packages),
        "etc/cloche-wgetrc": _WGET,
    }


def compile_programs(template: Template) -> None:
    """Programs of ours start in every sandbox, where their bytecode cannot be kept. Where we have the same Python and
    may write to the package, it is kept beside them, as Python does for all that it imports."""
    if template.python_version.split(".")[:2] == [str(number) for number in sys.version_info[:2]]:
        for source in (_GUEST / name for name in _COMPILED_PROGRAMS):
            with contextlib.suppress(OSError):
                if not _is_compiled(source):
                    py_compile.compile(str(source), quiet=2)


def _is_compiled(source: Path) -> bool:
    kept = Path(cache_from_source(str(source)))
    return kept.exists() and kept.stat().st_mtime >= source.stat().st_mtime


def installer_programs(packages: bool) -> dict[str, str]:
    """The uv programs by name. uv's own `pip` has nowhere to install to, and without an index it must explain
    why: guest/uv.py does both.
    """
    if not packages:
        return {"uv": _shell_script(f'{_RUN_OWN_UV} "$@"'), "uvx": _shell_script(f'{_RUN_OWN_UV} tool run "$@"')}
    pip = f'case " $* " in *" pip "*) {_RUN_OWN_UV} "$@" ;; esac'
    return {"uv": _shell_script(pip, f'{_RUN_UV} "$@"'), "uvx": _shell_script(f'{_RUN_UV} tool run "$@"')}


def _shell_script(*lines: str) -> str:
    return "\n".join(["#!/bin/sh", *lines, ""])


def covered_files() -> dict[str, str]:
    """Files of the template that others of the root lie over."""
    return {"opt/cloche/env/pyvenv.cfg": f"{SITE_PATH}.cfg"}


def installer_binds() -> list[tuple[str, str]]:
    try:
        return [(find_uv_bin(), UV_PATH)]
    except FileNotFoundError:
        return []  # templates cannot be built then, but sandboxes run


def _environment_settings(template: Template) -> str:
    """Settings as if the environment showed the system's packages: only then is the user's site-packages
    searched.

    Raises NurseryFailed.
    """
    try:
        lines = Path(template.root, "env", "pyvenv.cfg").read_text("utf-8").splitlines()
    except OSError as error:
        raise errors.NurseryFailed(f"the environment of {template.ref} is damaged: {error}") from None
    kept = [line for line in lines if not line.startswith("include-system-site-packages")]
    return "\n".join([*kept, "include-system-site-packages = true", ""])


def _pip_config(packages: bool) -> str:
    index = {"index-url": f"{DOOR_URL}/pypi/simple/"} if packages else {}
    tables = {**_PIP, "global": {**_PIP["global"], **index}}
    return "\n".join(f"[{name}]\n{_assignment_lines(table)}" for name, table in tables.items())


def _uv_config(packages: bool) -> str:
    index = f'[[index]]\nname = "host"\nurl = "{DOOR_URL}/pypi/simple/"\ndefault = true\n' if packages else ""
    return _assignment_lines(_UV) + index


def _npm_config(packages: bool) -> str:
    return _assignment_lines({**_NPM, **({"registry": f"{DOOR_URL}/npm/"} if packages else {})})


def _assignment_lines(table: dict[str, str]) -> str:
    return "".join(f"{key} = {value}\n" for key, value in table.items())


PYTHON_DIRECTORY = "/opt/cloche/python"
ENV_DIRECTORY = "/opt/cloche/env"
LIB_DIRECTORY = "/opt/cloche/lib"
PROGRAMS_DIRECTORY = "/opt/cloche/programs"
FRONT_DIRECTORY = "/opt/cloche/front"  # programs of ours that come before those of the template; see `installer_files`

# Places of the host's /etc that programs below /usr need, and that hold nothing of the host's own.
_ETC_SHARED = (
    "alternatives",  # /usr/bin/awk and others are links through it
    "ld.so.cache",  # where libraries are
    "ssl/certs",  # public certificates
    "ca-certificates",
    "fonts",
    "R",  # of Debian's R: where it looks for packages, compilers and libraries
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
# Programs of ours, before the host's on the PATH: its own sudo can only fail here. See guest/init/sudo_server.py.
_SUDO = f'import sys; sys.path.insert(0, "{LIB_DIRECTORY}"); from cloche.guest.bin.sudo import main; main()'
_OWN_PROGRAMS = {"sudo": f"#!/bin/sh\nexec {ENV_DIRECTORY}/bin/python -ISc '{_SUDO}' \"$@\"\n"}
# See guest/init/warm_python.py. No shell in between, and no package: it is in the way of every start of Python.
_WARM_PYTHON = f"""#!{ENV_DIRECTORY}/bin/python3 -IS
import sys
sys.path.insert(0, "{LIB_DIRECTORY}/cloche/guest/python")
from client import main
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
    "workspace",
    "tmp",
    "var/tmp",
    "run",
    "root",
    "opt/cloche/cell",
)


_PREFIX_PARTS = ("bin", "lib", "lib64", "include", "share")  # of a Python's prefix; beside them may lie anything


class RootPlan(Struct):
    """Directories, files, links and read-only binds that make a nursery's root. Paths inside are relative to it."""

    directories: list[str]
    files: dict[str, str]
    programs: dict[str, str]  # files that can be executed
    links: dict[str, str]
    binds: list[tuple[str, str]]
    covers: dict[str, str]  # mounts over existing paths: path -> another path of the root
    devices: list[str]


def plan_root(template: Template, *, packages: bool = False) -> RootPlan:
    """The root for nurseries of `template` on this host. `packages`: whether sandboxes have a package index."""
    if template.image is not None:
        return _plan_image_root(template, template.image, packages)
    links = {"dev/fd": "/proc/self/fd", "dev/stdin": "/proc/self/fd/0", "dev/stdout": "/proc/self/fd/1"}
    links |= {"dev/stderr": "/proc/self/fd/2", "dev/ptmx": "pts/ptmx", "etc/mtab": "/proc/self/mounts"}
    links |= {"etc/os-release": "../usr/lib/os-release", "etc/localtime": "/usr/share/zoneinfo/Etc/UTC"}
    links[f"{FRONT_DIRECTORY[1:]}/lib"] = f"{ENV_DIRECTORY}/lib"
    binds = [("/usr", "usr"), *_system_directories(links), *_etc_binds()]
    binds += [(f"{template.root}/env", ENV_DIRECTORY[1:]), *_guest_code(), *installer_binds()]
    binds += _prefix_binds(template, links)
    return RootPlan(
        directories=[*_DIRECTORIES, *(["opt/cloche/warm"] if packages else [])],
        files={f"etc/{name}": text for name, text in _ETC_OWN.items()} | installer_files(template, packages=packages),
        programs=_plan_programs(template, packages),
        links=links,
        binds=binds,
        covers=dict.fromkeys(_site_packages(template), SITE_PATH) | covered_files(),
        devices=[f"/dev/{name}" for name in _DEVICES],
    )


def _plan_image_root(template: Template, image: ImageOrigin, packages: bool) -> RootPlan:
    """The root of a template that was imported from an image: the image's files in place of the host's.

    Its directories are mounted one by one in a root that is ours: so none of its links is on the way to a mount point,
    or to anything that is mounted.
    """
    links = {"dev/fd": "/proc/self/fd", "dev/stdin": "/proc/self/fd/0", "dev/stdout": "/proc/self/fd/1"}
    links |= {"dev/stderr": "/proc/self/fd/2", "dev/ptmx": "pts/ptmx"}
    links[f"{FRONT_DIRECTORY[1:]}/lib"] = f"{ENV_DIRECTORY}/lib"
    binds = _image_binds(f"{template.root}/{IMAGE_DIRECTORY}", links)
    binds += [(f"{template.root}/env", ENV_DIRECTORY[1:]), *_guest_code(), *installer_binds()]
    covers = covered_files()
    if image.own_python:
        links[PYTHON_DIRECTORY[1:]] = template.python_prefix
    else:
        binds += _private_python_binds(template, image, links)
        covers |= dict.fromkeys(_prefix_packages(template), SITE_PATH)
    files = {f"etc/{name}": text for name, text in _ETC_OWN.items()} | installer_files(template, packages=packages)
    files[SITE_FILE[1:]] = _IMAGE_PTH
    return RootPlan(
        directories=[*_DIRECTORIES, *(["opt/cloche/warm"] if packages else [])],
        files={_move_from_etc(path): text.replace("/bin/bash", image.shell) for path, text in files.items()},
        programs=_plan_programs(template, packages),
        links=links,
        binds=binds,
        covers=covers,
        devices=[f"/dev/{name}" for name in _DEVICES],
    )


def _move_from_etc(path: str) -> str:
    """The image's /etc is mounted whole; in it are links to our files, which lie elsewhere."""
    return ETC_DIRECTORY[1:] + path.removeprefix("etc") if path.startswith("etc/") else path


def _image_binds(root: str, links: dict[str, str]) -> list[tuple[str, str]]:
    """Binds of what is in the image's root, of the children of directories in which there are places of ours. Symlinks
    become links of the same target."""
    binds = []
    own = {"/".join(path.split("/")[:depth]) for path in _DIRECTORIES for depth in (1, 2)} | {"opt/cloche"}
    for entry in _list_entries(root):
        if entry.name in MERGED_DIRECTORIES:
            inside = _list_entries(entry.path) if entry.is_dir(follow_symlinks=False) else []
            found = [(f"{entry.name}/{child.name}", child) for child in inside]
        else:
            found = [(entry.name, entry)] if entry.name not in SYSTEM_DIRECTORIES else []
        for name, each in found:
            if name in own:
                continue
            if each.is_symlink():
                links[name] = os.readlink(each.path)
            elif each.is_dir(follow_symlinks=False) or each.is_file(follow_symlinks=False):
                binds.append((each.path, name))
    return binds


def _list_entries(directory: str) -> list[os.DirEntry[str]]:
    """Raises NurseryFailed."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda each: each.name)
    except OSError as error:
        raise errors.NurseryFailed(f"the image's files are damaged: {error}") from None


def _private_python_binds(template: Template, image: ImageOrigin, links: dict[str, str]) -> list[tuple[str, str]]:
    """Our Python with the libraries of this host, for nobody but itself."""
    prefix = os.path.realpath(template.python_prefix)
    loader = os.path.realpath(image.loader)
    links[PRIVATE_LOADER[1:]] = LOADER_COPY
    with open(loader, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != image.loader_sha256:
            raise errors.NurseryFailed(f"this host's C library was replaced: import the image of {template.ref} again")
    parts = [name for name in _PREFIX_PARTS if os.path.isdir(f"{prefix}/{name}")]
    binds = [(f"{prefix}/{name}", f"{PYTHON_DIRECTORY[1:]}/{name}") for name in parts]
    return [*binds, *_shared_libraries(prefix), (os.path.dirname(loader), PRIVATE_LIBRARIES[1:])]


def _plan_programs(template: Template, packages: bool) -> dict[str, str]:
    minor = ".".join(template.python_version.split(".")[:2])
    pythons = {f"{FRONT_DIRECTORY[1:]}/bin/{name}": _WARM_PYTHON for name in ("python", "python3", f"python{minor}")}
    return pythons | {
        f"{PROGRAMS_DIRECTORY[1:]}/{name}": text
        for name, text in (_OWN_PROGRAMS | installer_programs(packages)).items()
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
    return [(str(package / name), f"{LIB_DIRECTORY[1:]}/cloche/{name}") for name in ("guest", "linux")]


def _below_usr(prefix: str) -> bool:
    return prefix == "/usr" or prefix.startswith("/usr/")


def _prefix_binds(template: Template, links: dict[str, str]) -> list[tuple[str, str]]:
    prefix = os.path.realpath(template.python_prefix)
    if _below_usr(prefix):
        links[PYTHON_DIRECTORY[1:]] = prefix
        return []
    parts = [name for name in _PREFIX_PARTS if os.path.isdir(f"{prefix}/{name}")]
    return [*((f"{prefix}/{name}", f"{PYTHON_DIRECTORY[1:]}/{name}") for name in parts), *_shared_libraries(prefix)]


_OWN_PATH = "/home/user/.local/bin:/opt/cloche/front/bin:/opt/cloche/env/bin:/opt/cloche/programs"
_PROGRAM_ENVIRONMENT = {
    "PATH": f"{_OWN_PATH}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/opt/cloche/python/bin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "SHELL": "/bin/bash",
    "MPLBACKEND": "Agg",
    "TZ": "UTC",
}
# One thread while importing: threads do not survive a fork. The kernel lifts this in the child.
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def program_environment(template: Template) -> dict[str, str]:
    """The variables of every program, with those that it needs to find this root's parts."""
    if template.image is not None:
        own = {"PATH": f"{_OWN_PATH}:{template.image.path}", "SHELL": template.image.shell}
        return {**_PROGRAM_ENVIRONMENT, **INSTALLER_ENVIRONMENT, **own}
    shared = _shared_libraries(os.path.realpath(template.python_prefix))
    libraries = {"LD_LIBRARY_PATH": SHARED_DIRECTORY} if shared else {}
    return {**_PROGRAM_ENVIRONMENT, **INSTALLER_ENVIRONMENT, **libraries}


def import_environment(template: Template) -> dict[str, str]:
    """The variables of the process that makes a template's imports."""
    one_thread = dict.fromkeys(_THREAD_VARIABLES, "1")
    return {**program_environment(template), **one_thread, "HOME": "/tmp", "MPLCONFIGDIR": "/tmp"}


def _shared_libraries(prefix: str) -> list[tuple[str, str]]:
    """The prefix's libpython, alone in a directory of its own.

    An interpreter that was built with a shared library looks for it where the prefix was on the host, which is not
    there inside. It would not start, or run on the system's library of another version than its modules. The whole
    lib directory in LD_LIBRARY_PATH would replace the system's libraries for every program.
    """
    if _below_usr(prefix):
        return []
    names = glob.glob("libpython3*.so.1.0", root_dir=f"{prefix}/lib")
    return [(f"{prefix}/lib/{name}", f"{SHARED_DIRECTORY[1:]}/{name}") for name in names]


def _site_packages(template: Template) -> list[str]:
    """Directories of the host's own Python packages: they are covered."""
    libraries = ("usr/lib", "usr/lib64", "usr/local/lib", "usr/local/lib64")
    patterns = [f"{library}/python3*/{kind}-packages" for library in libraries for kind in ("dist", "site")]
    found = [path for pattern in patterns for path in glob.glob(pattern, root_dir="/")]
    if not _below_usr(os.path.realpath(template.python_prefix)):
        found += _prefix_packages(template)
    return sorted(set(found))


def _prefix_packages(template: Template) -> list[str]:
    """The same directories of the template's Python, where its prefix is mounted."""
    prefix = os.path.realpath(template.python_prefix)
    inside = [
        path for kind in ("dist", "site") for path in glob.glob(f"lib*/python3*/{kind}-packages", root_dir=prefix)
    ]
    return [f"{PYTHON_DIRECTORY[1:]}/{path}" for path in inside]
