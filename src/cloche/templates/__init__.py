"""Templates: immutable, versioned Python environments that sandboxes are made from.

    recipe.py      a template.toml, parsed and checked
    pythons.py     the interpreters of this host
    uv.py          running uv, with the package indexes of the user's own pip and uv settings
    build.py       a recipe becomes a lock of exact, hashed wheels, then files: atomically, once
    catalogue.py   the versions that were built, and the version that a name means
    comparison.py  the difference between two versions
    archive.py     a version as one file: export and import

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
