"""The `uv` on the PATH of a sandbox: `uv pip` above all. Everything else goes to uv unchanged.

The template's environment cannot be written to. So packages that `uv pip` installs go to the user's
site-packages, as with pip. uv looks at one site-packages only, and would fetch again all that the template
has; while it runs, that one holds a *stand-in* for each distribution of the template: its name, version and
metadata, and none of its files.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed knows only `signal`
import fcntl
import os
import sys

from cloche.guest.paths import USER_BASE
from cloche.guest.python.installers import explain_failure, give_to_user, has_index, names_own_index, retry_count

UV = "/opt/cloche/uv"
ENV = "/opt/cloche/env"
CACHE = "/home/user/.cache/uv"
WARM_ANSWERS = "/opt/cloche/warm"
_SERIES = f"python{sys.version_info[0]}.{sys.version_info[1]}"
TEMPLATE_SITE = f"{ENV}/lib/{_SERIES}/site-packages"
USER_SITE = f"{USER_BASE}/lib/{_SERIES}/site-packages"
_COMMANDS = ("install", "uninstall", "sync", "list", "freeze", "show")  # `check` and `tree` take none
_OWN_PLACE = ("--python", "-p", "--target", "-t", "--prefix", "--system", "--user")
_FETCHING = {"install", "sync", "add", "lock", "run"}
_FAILED = 2  # uv's way to say that it could not do it
_INFO = ".dist-info"


def main() -> None:
    """Never returns."""
    arguments = sys.argv[1:]
    at = _command_index(arguments)
    if not has_index():
        os.environ.setdefault("UV_HTTP_RETRIES", retry_count())
    if not at or _has_own_place(arguments):
        _run_unchanged(arguments)
    place = ["--prefix", USER_BASE, "--python", f"{ENV}/bin/python"]
    _copy_interpreter_answers()
    status = _run_with_stand_ins(["uv", *arguments[: at + 1], *place, *arguments[at + 1 :]])
    if os.geteuid() == 0:
        give_to_user(USER_BASE, CACHE)
    _exit_with(status, arguments)


def _run_unchanged(arguments: list) -> None:
    """Never returns."""
    if not _fetches_packages(arguments):
        os.execv(UV, ["uv", *arguments])
    _exit_with(_run_uv(["uv", *arguments]), arguments)


def _exit_with(status: int, arguments: list) -> None:
    failed = status != 0 if has_index() else status == _FAILED
    if failed and _fetches_packages(arguments) and not names_own_index(arguments):
        explain_failure("pip")
    sys.exit(status)


def _fetches_packages(arguments: list) -> bool:
    """Whether uv downloads packages. Not `uv run`: its status is that of a program."""
    words = [word for word in arguments if not word.startswith("-")]
    return words[:1] != ["run"] and bool(_FETCHING & set(words))


def _copy_interpreter_answers() -> None:
    """Copies the interpreter facts cached by the nursery's uv: see `uv_warmup`.

    One file, in directories named by uv.
    """
    if os.environ.get("UV_CACHE_DIR") or os.path.exists(CACHE):
        return
    for directory, _, files in os.walk(WARM_ANSWERS):
        for name in files if os.path.basename(os.path.dirname(directory)).startswith("interpreter-") else ():
            place = CACHE + directory[len(WARM_ANSWERS) :]
            os.makedirs(place, exist_ok=True)
            with open(f"{directory}/{name}", "rb") as kept, open(f"{place}/{name}", "wb") as copy:
                copy.write(kept.read())


def _command_index(arguments: list) -> int:
    """The index of the command in `uv pip COMMAND` that needs a place; 0 where there is none."""
    words = [at for at, word in enumerate(arguments) if not word.startswith("-")]
    if len(words) < 2 or arguments[words[0]] != "pip" or arguments[words[1]] not in _COMMANDS:
        return 0
    return words[1]


def _has_own_place(arguments: list) -> bool:
    if any(word in _OWN_PLACE or word.startswith(tuple(f"{each}=" for each in _OWN_PLACE)) for word in arguments):
        return True
    if any(os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "UV_PYTHON", "UV_SYSTEM_PYTHON")):
        return True
    return _is_below_environment(os.getcwd())


def _is_below_environment(directory: str) -> bool:
    while True:
        if os.path.exists(f"{directory}/.venv/pyvenv.cfg"):
            return True
        if directory == "/":
            return False
        directory = os.path.dirname(directory)


def _run_with_stand_ins(words: list) -> int:
    """Runs uv with the stand-ins. Those in use by another uv stay until it, too, has ended."""
    os.makedirs(USER_SITE, exist_ok=True)
    lock = os.open(f"{USER_BASE}/.stand-ins", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    fcntl.flock(lock, fcntl.LOCK_SH)
    _make_stand_ins()
    status = _run_uv(words)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_stand_ins()
    except BlockingIOError:
        pass
    return status


def _run_uv(words: list) -> int:
    """Runs uv; returns its status. Signals are uv's affair: those of a terminal it gets itself.

    Then we clean up.
    """
    pids: list = []
    of_terminals = (_signal.SIGINT, _signal.SIGQUIT)
    for number in of_terminals:
        _signal.signal(number, _signal.SIG_IGN)
    for number in (_signal.SIGTERM, _signal.SIGHUP):
        if _signal.getsignal(number) == _signal.SIG_IGN:
            continue  # as with nohup: uv is to ignore it, too
        _signal.signal(number, lambda number, _: os.kill(pids[0], number) if pids else None)
    pids.append(os.posix_spawn(UV, words, os.environ, setsigdef=of_terminals))
    status = os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1])
    return status if status >= 0 else 128 - status


def _make_stand_ins() -> None:
    have = {_distribution_name(info) for info in os.listdir(USER_SITE) if info.endswith(_INFO)}
    for info in os.listdir(TEMPLATE_SITE):
        if info.endswith(_INFO) and _distribution_name(info) not in have:
            _make_stand_in(info)


def _make_stand_in(info: str) -> None:
    """A hundred are made in each run: as few calls as possible.

    uv removes the files named in RECORD to replace it.
    """
    directory = f"{USER_SITE}/{info}"
    try:
        os.mkdir(directory)
        os.symlink(f"{TEMPLATE_SITE}/{info}/METADATA", f"{directory}/METADATA")
        record = os.open(f"{directory}/RECORD", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:  # another uv makes it, too
        return
    os.write(record, f"{info}/METADATA,,\n{info}/RECORD,,\n".encode())
    os.close(record)


def _remove_stand_ins() -> None:
    for info in os.listdir(USER_SITE):
        if info.endswith(_INFO) and os.path.islink(f"{USER_SITE}/{info}/METADATA"):
            _remove_stand_in(f"{USER_SITE}/{info}")


def _remove_stand_in(directory: str) -> None:
    try:
        os.unlink(f"{directory}/METADATA")
        os.unlink(f"{directory}/RECORD")
        os.rmdir(directory)
    except OSError:  # an older one is not whole, or something was added
        for name in os.listdir(directory):
            os.unlink(f"{directory}/{name}")
        os.rmdir(directory)


def _distribution_name(info: str) -> str:
    return info.partition("-")[0].lower().replace(".", "_")
