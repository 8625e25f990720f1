"""Templates: immutable, versioned Python environments that sandboxes are made from.

    recipe.py     what a template.toml says
    pythons.py    the interpreters of this host
    registry.py   where packages come from: the user's own pip and uv settings
    uv.py         running uv
    lock.py       a recipe and an interpreter become a list of exact, hashed wheels
    install.py    that list becomes files
    build.py      all of it, atomically, once
    catalogue.py  what was built, and which version a name means
    difference.py what is different between two versions
    archive.py    a version as one file, out and in again
    importing.py  such a file becomes a template of this host

Wheels are hostile. Unpacking one runs none of its code, but starting an interpreter whose site-packages holds one does
(a `.pth` file is executed at every start). So nothing here ever starts a template's own interpreter: the trusted base
interpreter does all the work, with `-I -S`.
"""

from cloche.templates.archive import export, import_archive
from cloche.templates.build import Progress, Report, build, ensure
from cloche.templates.catalogue import Catalogue
from cloche.templates.comparison import Difference, difference
from cloche.templates.recipe import Recipe

__all__ = [
    "Catalogue",
    "Difference",
    "Progress",
    "Recipe",
    "Report",
    "build",
    "difference",
    "ensure",
    "export",
    "import_archive",
]
