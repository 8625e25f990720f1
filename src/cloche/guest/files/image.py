"""Images of a sandbox's files: init's request handlers, and the forks of init that do the work.

Init itself neither waits nor reads: the fork has one end of a pipe of the host's, and init reports how it has ended.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed knows only `signal`
import errno
import os
import select

from cloche.guest.files import image_reader, image_writer
from cloche.guest.init import errors
from cloche.guest.kernel.installed import directory_for_packages
from cloche.linux import syscalls

# What lasts of a sandbox. Not shared memory, and not /run: both are of programs that run.
_PLACES = {
    "home": "/home/user",
    "data": "/mnt/data",
    "app": "/app",
    "workspace": "/workspace",
    "tmp": "/tmp",
    "vartmp": "/var/tmp",
    "root": "/root",
}
_PIPE = 3  # in a fork
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_KILLED = {"code": "file_error", "message": "who did it was killed"}


class ImageHandlers:
    def __init__(self, processes, identities, defaults, event):
        self._processes = processes
        self._identities = identities
        self._defaults = defaults
        self._event = event
        self._forks: dict = {}  # pid -> (the host's name for it, whether it restores)

    def verb_handlers(self) -> dict:
        return {"image_save": self._save_image, "image_restore": self._restore_image}

    def ended(self, pid: int, status: int) -> None:
        """Handles the end of any child of init."""
        name, restored = self._forks.pop(pid, (None, False))
        if name is not None:
            packages = restored and os.path.isdir(directory_for_packages())  # a kernel from before has others
            self._event({"ev": "image_ended", "image": name, "err": _fork_error(status), "packages": packages})

    def _save_image(self, header: dict, _: bytes) -> dict:
        return self._start_fork(header, self._write_image)

    def _restore_image(self, header: dict, _: bytes) -> dict:
        """Starts a restore, after killing those before it.

        The host asks anew after it gave up an earlier one, which may still have a whole pipe to unpack.
        """
        for pid in self._restoring_pids():
            os.kill(pid, _signal.SIGKILL)
        return self._start_fork(header, self._read_image)

    def _start_fork(self, header: dict, work) -> dict:
        (pipe,) = header["wires"]
        pid = self._processes.fork()
        if pid == 0:
            self._run_fork(pipe, work)
        self._forks[pid] = (header["image"], work == self._read_image)
        return {}

    def _run_fork(self, pipe: int, work) -> None:
        """Never returns. The error's number is the exit status."""
        number = errno.EIO
        try:
            os.dup2(pipe, _PIPE, inheritable=False)
            syscalls.close_from(_PIPE + 1)
            _signal.set_wakeup_fd(-1)
            os.setsid()
            self._identities.confine_fork()
            work()
            number = 0
        except OSError as error:
            number = error.errno or errno.EIO
        except MemoryError:
            number = errno.ENOMEM
        except (ValueError, OverflowError):  # of names and times that are none
            number = errno.EBADMSG
        finally:  # a fork must never run on into its parent's code
            os._exit(number)

    def _write_image(self) -> None:
        image_writer.ImageWriter(_PIPE, list(self._image_places().items())).write()

    def _read_image(self) -> None:
        for pid in self._restoring_pids():
            _wait_for_end(pid)
        image_reader.ImageReader(_PIPE, self._image_places()).read()

    def _restoring_pids(self) -> list:
        """The earlier restores that have not ended, as far as is known. Two at once would disturb each other."""
        return [pid for pid, (_, restores) in self._forks.items() if restores]

    def _image_places(self) -> dict:
        """The directories of an image. Without walls only the sandbox's own: the others are the host's."""
        own = self._defaults.places
        return {name: self._defaults.place(path) for name, path in _PLACES.items() if not own or path in own}


def _wait_for_end(pid: int) -> None:
    """Waits for a process that init has killed."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    ended.poll()
    os.close(pidfd)


def _fork_error(status: int) -> dict | None:
    number = os.waitstatus_to_exitcode(status)
    if number < 0:
        return _KILLED
    if number in _FULL:
        return {"code": "no_space", "message": "the sandbox's writable space is too small for it"}
    if number == errno.EBADMSG:
        return {"code": "file_error", "message": "the image is damaged"}
    return errors.describe_error(OSError(number, os.strerror(number))) if number else None
