"""The entry point of a nursery's process, with none of the modules that sandboxes touch imported yet."""

from __future__ import annotations

from cloche.guest.zygote import heap


def main(channel_fd: int) -> None:
    """Never returns."""
    heap.fill_heap()  # so that what is imported next, which every init and kernel uses, lies together
    from cloche.guest.zygote import zygote

    zygote.main(channel_fd)
