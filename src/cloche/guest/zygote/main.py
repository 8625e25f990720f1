"""Where a nursery's process begins, with nothing imported yet of what sandboxes touch."""

from __future__ import annotations

from cloche.guest.zygote import heap


def main(channel_fd: int) -> None:
    """Never returns."""
    heap.fill()  # so that what is imported next, which every init and kernel uses, lies together
    from cloche.guest.zygote import zygote

    zygote.main(channel_fd)
