"""Startup code of the template's interpreter, run from a `.pth` file: see `cloche.isolation.rootfs`.

Packages that programs install go to the user's own site-packages, and come before the template's. This is
compiled at every start, and so kept short.
"""

import os
import site
import sys

LIB = "/opt/cloche/lib"
SHOW = "module://cloche_show"  # beside this file


def draws_to_files() -> bool:
    """Whether figures shall become files: see `show`. Then this interpreter's matplotlib is told so, and not those of
    the programs that it starts: in an environment of their own they have no such backend."""
    if os.environ.get("CLOCHE_FIGURES") == "files" and os.environ.get("MPLBACKEND", "Agg") == "Agg":
        os.environ._data[b"MPLBACKEND"] = SHOW.encode()  # type: ignore  # typeshed has it not
    return os.environ.get("MPLBACKEND") == SHOW


def _arrange_path() -> None:
    if not draws_to_files():
        own = os.path.dirname(__file__)
        sys.path[:] = [path for path in sys.path if path != own]
    if not site.ENABLE_USER_SITE:  # `-I` and `-s`: our own processes above all
        return
    if os.geteuid() == 0:  # what root leaves in that directory, `user` could not remove
        sys.dont_write_bytecode = True
    user = site.getusersitepackages()
    others = [path for path in sys.path if path != user]
    place = next((at for at, path in enumerate(others) if path.startswith(sys.prefix)), len(others))
    sys.path[:] = [*others[:place], user, *others[place:]]
    if not os.path.isdir(user):  # else it would not be looked at again, should it appear
        from _frozen_importlib_external import FileFinder, _get_supported_file_loaders  # type: ignore  # typeshed has it not

        sys.path_importer_cache[user] = FileFinder(user, *_get_supported_file_loaders())
    program = _program_name(sys.orig_argv[1:])
    if program.startswith(("pip", "npm", "npx")):
        sys.path.insert(0, LIB)
        from cloche.guest.python import installers

        sys.path.remove(LIB)
        installers.prepare_installer(program)


def _program_name(arguments: list) -> str:
    """The name of the module or script that an interpreter with those arguments runs."""
    for at, word in enumerate(arguments):
        if word == "-m":
            return "".join(arguments[at + 1 : at + 2])
        if not word.startswith("-"):
            return os.path.basename(word)
        if word in ("-c", "-W", "-X"):
            break
    return ""


_arrange_path()
