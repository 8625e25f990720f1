"""This page is being built."""

from __future__ import annotations

from cloche.api.ui.house import House, Page


def pages(house: House) -> list[Page]:
    return []
