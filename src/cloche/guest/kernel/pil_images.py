"""Pictures of PIL in cells: `image.show()` shows them in the cell's output, as there is no other screen.

Where the run asks for it, so does `image.save("name.png")`: clients of E2B expect a picture that was saved to be a
result. It is not so otherwise, since in a notebook saving shows nothing, and matplotlib's `savefig` saves by PIL too.
"""

from __future__ import annotations

import sys
from typing import Any

from cloche.guest.kernel.import_hooks import after_import

show_saved = [False]  # whether this run shows what is saved to a named file
_own: dict = {}  # PIL's methods


def hook_pil() -> None:
    """From now on PIL's pictures are shown, whenever it is imported."""
    after_import("PIL.Image", _patch_image_class)


def unhook_pil() -> None:
    """Undoes `hook_pil`, in a process that shows nothing and has removed its import hooks."""
    for name, method in _own.items():
        setattr(sys.modules["PIL.Image"].Image, name, method)


def _patch_image_class() -> None:
    image_class = sys.modules["PIL.Image"].Image
    save = image_class.save
    _own.update(show=image_class.show, save=save)

    def show(self: Any, title: Any = None) -> None:
        _display_image(self)

    def save_and_show(self: Any, fp: Any, format: Any = None, **params: Any) -> None:
        save(self, fp, format, **params)
        if show_saved[0] and isinstance(fp, str):
            _display_image(self)

    show.__doc__, save_and_show.__doc__ = image_class.show.__doc__, save.__doc__
    save_and_show.__name__ = "save"
    image_class.show, image_class.save = show, save_and_show


def _display_image(image: Any) -> None:
    from IPython.display import display

    display(image)
