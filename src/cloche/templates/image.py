"""Imports an image as a template: whole or not at all.

The image's files become `rootfs/` of the template, as `image_tree` writes them, and what the guest needs lies beside
them in `env/`: on the image's own Python, or on the host's, where the image has none.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cloche import errors
from cloche.image_layout import (
    ETC_DIRECTORY,
    IMAGE_DIRECTORY,
    LOADER_COPY,
    MAX_ENTRIES,
    MERGED_DIRECTORIES,
    OWN_ETC,
    PRIVATE_LIBRARIES,
    SHARED_DIRECTORY,
    SITE_FILE,
    SYSTEM_DIRECTORIES,
)
from cloche.model import ImageOrigin, Template
from cloche.templates import build, image_python, pythons
from cloche.templates import catalogue as catalogues
from cloche.templates import recipe as recipes
from cloche.templates.archive import check_digest
from cloche.templates.build import ReportProgress, TemplateProgress, ignore_progress
from cloche.templates.catalogue import Catalogue
from cloche.templates.image_python import ImagePython
from cloche.templates.image_source import ImageLayers, read_image
from cloche.templates.image_tree import ImageNode, ImageTree
from cloche.templates.pythons import Interpreter
from cloche.templates.recipe import Recipe

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Variables of images that sandboxes have their own of, or that would keep our Python from starting.
_DROPPED_VARIABLES = (
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "HOSTNAME",
    "TERM",
    "PYTHONHOME",
)
_SHELLS = ("/bin/bash", "/bin/sh")


def import_image(
    catalogue: Catalogue,
    source: Path,
    recipe: Recipe,
    sha256: str | None = None,
    report: ReportProgress = ignore_progress,
) -> Template:
    """The template that the image there is, with the recipe's name, packages, imports and settings; the existing one
    if the same was imported before. With `sha256`, the archive must have that digest.

    Raises InvalidRequest or TooLarge for an image that is damaged, hostile, or for another machine;
    TemplateBuildFailed where the guest's packages cannot be had.
    """
    if sha256 is not None:
        check_digest(source, sha256)
    try:
        with catalogue.locked(recipe.name), catalogue.scratch_directory(recipe.name) as scratch:
            report(TemplateProgress(phase="archive", detail="reading the image", fraction=0.0))
            image = read_image(source, scratch)
            template = _import_layers(catalogue, source, image, recipe, scratch, report)
    except OSError as error:
        raise errors.InvalidRequest(f"cannot import {source}: {error}") from None
    report(TemplateProgress(phase="done", detail=template.ref, fraction=1.0))
    return template


def _import_layers(
    catalogue: Catalogue, source: Path, image: ImageLayers, recipe: Recipe, scratch: Path, report: ReportProgress
) -> Template:
    tree = ImageTree()
    try:
        for layer in image.layers:
            tree.add_layer(layer)
        recipe, search_path = _merge_environment(recipe, image.env)
        found = image_python.find_image_python(tree, search_path)
        origin = ImageOrigin(
            source=f"{source.name} {image.reference}".rstrip(),
            digest=image.digest,
            own_python=found is not None,
            path=search_path,
            shell=next((shell for shell in _SHELLS if tree.find(shell)), _SHELLS[-1]),
        )
        _prepare_tree(tree)
        root = scratch / "root"
        root.mkdir()
        report(TemplateProgress(phase="archive", detail="unpacking the image", fraction=0.1))
        tree.write(root / IMAGE_DIRECTORY)
    finally:
        tree.close()
    builder = _GuestBuilder(recipe, found, root, report)
    version = builder.version(image.digest)
    existing = catalogue.get(recipe.name, version)
    if existing is not None:
        return existing
    origin = builder.fill_environment(origin)
    (root / "template.toml").write_text(recipes.canonical_text(recipe), "utf-8")
    size_bytes = build.make_readable(root)
    final = catalogue.directory / recipe.name / version
    template = build.describe_template(recipe, builder.interpreter, builder.locked, version, final, size_bytes)
    template = msgspec.structs.replace(template, image=origin, created_at=time.time())
    catalogues.write_template(template, root)
    if final.exists():  # damaged, or `get` would have found it
        final.rename(scratch / "damaged")
    root.rename(final)
    return template


def _merge_environment(recipe: Recipe, image_env: Sequence[str]) -> tuple[Recipe, str]:
    """The recipe with the image's variables, of which its own come first; and the image's PATH. Raises InvalidRequest,
    InvalidConfig.
    """
    pairs = dict(entry.partition("=")[::2] for entry in image_env)
    path = pairs.get("PATH") or _DEFAULT_PATH
    kept = {name: value for name, value in pairs.items() if name not in _DROPPED_VARIABLES}
    merged = msgspec.structs.replace(recipe, env={**kept, **recipe.env})
    if "\0" in path or len(path) > 4096:
        raise errors.InvalidRequest("the image's PATH is none")
    recipes.check_recipe("the image", merged)
    return merged, path


def _prepare_tree(tree: ImageTree) -> None:
    """Removes the parts that sandboxes have their own of, and links our files into /etc. Raises TooLarge."""
    for name in SYSTEM_DIRECTORIES:
        tree.root.children.pop(name, None)
    tree.make_directory("opt").children.pop("cloche", None)
    etc = tree.make_directory("etc").children
    for name in OWN_ETC:
        etc[name] = _make_link(f"{ETC_DIRECTORY}/{name}")
    etc["mtab"] = _make_link("/proc/self/mounts")
    merged = [tree.root.children[name] for name in MERGED_DIRECTORIES if name in tree.root.children]
    count = sum(len(each.children) for each in (tree.root, *merged))
    if count > MAX_ENTRIES:
        places = ", ".join(f"/{name}" for name in ("", *MERGED_DIRECTORIES))
        raise errors.TooLarge(f"the image has {count} entries in {places}: {MAX_ENTRIES} are allowed")


def _make_link(target: str) -> ImageNode:
    node = ImageNode("symlink", -1)
    node.target = target
    return node


class _GuestBuilder:
    """Makes `env/`: what the guest needs, on the image's Python or on the host's."""

    def __init__(self, recipe: Recipe, found: ImagePython | None, root: Path, report: ReportProgress):
        self._recipe = recipe
        self._found = found
        self._root = root
        self._report = report
        self._host = pythons.choose_interpreter(recipe.python if found is None else ">=3.10")
        self.interpreter = self._host if found is None else _describe_interpreter(found, self._host)
        report(TemplateProgress(phase="lock", detail="choosing packages", fraction=0.3))
        present = found.packages if found else frozenset()
        self.locked = build.lock_packages(
            recipe, self._host, root.parent, self._note, found.minor_version if found else "", present
        )

    def _note(self, line: str) -> None:
        self._report(TemplateProgress(phase="install", detail=line.strip(), fraction=0.5))

    def version(self, image_digest: str) -> str:
        own = build.template_version(self._recipe, self.interpreter, self.locked)
        return hashlib.sha256(f"{own} {image_digest}".encode()).hexdigest()

    def fill_environment(self, origin: ImageOrigin) -> ImageOrigin:
        """Returns the origin with the loader of this host, where that is needed."""
        lock_file = self._root / "lock.txt"
        lock_file.write_text(self.locked.text, "utf-8")
        env = self._root / "env"
        minor = self._found.minor_version if self._found else ""
        build.install_wheels(lock_file, self._host, env, self._note, minor)
        if self._host.minor_version == self.interpreter.minor_version:
            build.compile_bytecode(self._host, env, lambda _done, _all: None)
        if self._found is not None:
            site = env / "lib" / f"python{minor}" / "site-packages"
            site.mkdir(parents=True, exist_ok=True)
            (site / "cloche.pth").symlink_to(SITE_FILE)
            if self._found.site:
                (site / "image.pth").write_text(self._found.site + "\n", "utf-8")
            return origin
        program = f"python{self.interpreter.minor_version}"
        source = Path(os.path.realpath(self._host.path))
        shared = any(Path(self._host.prefix, "lib").glob("libpython3*.so.1.0")) and self._host.prefix != "/usr"
        libraries = SHARED_DIRECTORY if shared else PRIVATE_LIBRARIES
        loader = image_python.make_private_program(source, env / "bin" / program, libraries)
        digest = image_python.copy_loader(Path(loader), env / Path(LOADER_COPY).name, PRIVATE_LIBRARIES)
        return msgspec.structs.replace(origin, loader=loader, loader_sha256=digest)


def _describe_interpreter(found: ImagePython, host: Interpreter) -> Interpreter:
    minor = found.minor_version
    platform = f"cpython-{minor.replace('.', '')}-{os.uname().machine}-{sys.platform}-image"
    program = f"{found.prefix}/bin/python{minor}"
    return Interpreter(path=program, version=found.version, prefix=found.prefix, platform=platform)
