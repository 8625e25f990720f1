"""Templates: immutable, versioned Python environments that sandboxes are made from.

    recipe.py     the contents of a template.toml
    pythons.py    the interpreters of this host
    uv.py         running uv, with the user's own pip and uv settings for the registry
    build.py      lock a recipe to exact, hashed wheels, install and compile them, atomically, once
    catalogue.py  the built versions, the meaning of a name, and the removal of unneeded versions
    diff.py       the differences between two versions
    archive.py    a version as one file: export and import
    image.py      the import of an OCI image, and beside it where images come from (image_source.py), their files
                  (image_tree.py) and their Python (image_python.py)

Wheels are hostile. Unpacking one runs none of its code, but starting an interpreter with one in its
site-packages does (a `.pth` file is executed at every start). So nothing here ever starts a template's own
interpreter: the trusted base interpreter does all the work, with `-I -S`.
"""

from cloche.templates.archive import export_template, import_archive
from cloche.templates.build import ReportProgress, TemplateProgress, build_template, ensure_template
from cloche.templates.catalogue import Catalogue
from cloche.templates.comparison import Difference, compare_templates
from cloche.templates.image import import_image
from cloche.templates.recipe import Recipe

__all__ = [
    "Catalogue",
    "Difference",
    "Recipe",
    "ReportProgress",
    "TemplateProgress",
    "build_template",
    "compare_templates",
    "ensure_template",
    "export_template",
    "import_archive",
    "import_image",
]
