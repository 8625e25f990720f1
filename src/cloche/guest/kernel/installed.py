"""Packages that programs install, as kernels see them: before the template's, as soon as they are there.

Kernels are forks of a process that must never look into a directory that programs write to: neither the
zygote nor init has it on its path. For other interpreters see `usersite`.
"""

from __future__ import annotations

import importlib.machinery
import os
import site
import sys

_LOADERS = (
    (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES),
    (importlib.machinery.SourceFileLoader, importlib.machinery.SOURCE_SUFFIXES),
    (importlib.machinery.SourcelessFileLoader, importlib.machinery.BYTECODE_SUFFIXES),
)


def directory_for_packages() -> str:
    """The directory that programs install to; empty without walls, where there is no such place."""
    base = os.environ.get("PYTHONUSERBASE", "")
    return f"{base}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages" if base else ""


class InstalledPackages:
    """Made once in the zygote. `follow` is for kernels only."""

    def __init__(self) -> None:
        self.directory = directory_for_packages()
        self._changed_at = 0.0
        self._read: set = set()  # `.pth` files
        self._told: set = set()
        if self.directory:
            # A path that is not there when it is first looked at would not be looked at again. This finder looks at
            # each import, and so nothing needs to be done after an installation.
            sys.path_importer_cache[self.directory] = importlib.machinery.FileFinder(self.directory, *_LOADERS)

    def follow(self) -> None:
        """Makes this process find installed packages.

        For the first kernel there are none yet: it can do this before it
        is `user`, since no program has run.
        """
        if self.directory and self.directory not in sys.path:
            first = next((at for at, path in enumerate(sys.path) if path.startswith(sys.prefix)), len(sys.path))
            sys.path.insert(first, self.directory)

    def begin(self) -> None:
        """Starts in a kernel that is its user from now on."""
        if self.directory:
            if os.geteuid() == 0:  # what root leaves in that directory, `user` could not remove
                sys.dont_write_bytecode = True
            self.look()

    def look(self) -> None:
        """Call it when something may have been installed.

        Reads new `.pth` files: `pip install -e` leaves nothing else.
        """
        try:
            changed_at = os.stat(self.directory).st_mtime
        except OSError:
            return
        if changed_at != self._changed_at:
            self._changed_at = changed_at
            for name in sorted(os.listdir(self.directory)):
                if name.endswith(".pth") and name not in self._read:
                    self._read.add(name)
                    site.addpackage(self.directory, name, None)

    def hint(self) -> str:
        """A message, given once: the program has another version imported than the one just installed."""
        new = self.shadowed_modules() - self._told
        self._told |= new
        if not new:
            return ""
        names, are = ", ".join(sorted(new)), "is" if len(new) == 1 else "are"
        return f"Cloche: {names} {are} imported here already: restart this context to use what was installed."

    def shadowed_modules(self) -> set:
        """The modules here that were imported from the template, and are installed in another version meanwhile."""
        try:
            names = {name.partition(".")[0] for name in os.listdir(self.directory)} if self.directory else set()
        except OSError:
            return set()
        return {
            name for name in names if getattr(sys.modules.get(name), "__file__", None) in self._template_files(name)
        }

    def customize_modules(self) -> set:
        """Modules that an interpreter imports by itself when it starts."""
        names = ("sitecustomize", "usercustomize") if self.directory else ()
        return {name for name in names if os.path.exists(f"{self.directory}/{name}.py")}

    def _template_files(self, name: str) -> tuple:
        site_packages = f"{sys.prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        return f"{site_packages}/{name}/__init__.py", f"{site_packages}/{name}.py"
