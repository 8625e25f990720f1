"""What programs of one sandbox wrote and nobody has read: each queue is bounded, and all of them together are."""

from __future__ import annotations

from cloche.events import HIGH_WATER_BYTES, LEAST_QUEUE_BYTES, SANDBOX_QUEUE_BYTES, EventQueue, QueueBudget

BLOCK = 64 << 10


class Dropped:
    """Counts what was lost."""

    def __init__(self) -> None:
        self.blocks = 0

    def add(self, dropped: str) -> None:
        self.blocks += 1

    def take(self) -> list[str]:
        return []


def written(queue: EventQueue[str], calls: list[str], limit: int = 1000) -> int:
    """How many bytes it takes until it pauses whoever writes."""
    blocks = 0
    while not calls and blocks < limit:
        queue.put("x", BLOCK)
        blocks += 1
    return blocks * BLOCK


def test_a_queue_is_full_earlier_when_those_beside_it_hold_too_much():
    share, calls, queues = QueueBudget(), [], []
    for _ in range(100):
        queue: EventQueue[str] = EventQueue(lambda: calls.append("pause"), lambda: calls.append("resume"), share=share)
        queues.append(queue)
        assert written(queue, calls) <= HIGH_WATER_BYTES + BLOCK
        calls.clear()
    assert share.held_bytes <= SANDBOX_QUEUE_BYTES + HIGH_WATER_BYTES + len(queues) * (LEAST_QUEUE_BYTES + 2 * BLOCK)
    queues[-1].take()
    assert calls == ["resume"]  # whoever reads goes on, whatever the others do


def test_lost_read_or_dropped_output_is_no_longer_held():
    share, gap = QueueBudget(), Dropped()
    losing: EventQueue[str] = EventQueue(share=share)
    losing.lose(gap)
    for _ in range(200):
        losing.put("x", BLOCK)
    assert share.held_bytes <= HIGH_WATER_BYTES and gap.blocks > 100
    losing.take()
    assert share.held_bytes == 0
    losing.put("x", BLOCK)
    del losing
    assert share.held_bytes == 0
