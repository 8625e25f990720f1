"""What the gateway has done since it began, counted."""

from __future__ import annotations

from collections import Counter

from cloche.store.gateway import Step


class Tally:
    """Counts records as they are made. All words in it are ours."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()  # by outcome
        self.model_calls: Counter[str] = Counter()
        self.executions: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter(input=0, output=0)

    def count(self, step: Step) -> None:
        counts = {"request": self.requests, "model_call": self.model_calls, "execution": self.executions}.get(step.kind)
        if counts is not None:
            counts[step.outcome] += 1
        if step.kind == "model_call":
            self.tokens["input"] += step.fields.get("input_tokens", 0)
            self.tokens["output"] += step.fields.get("output_tokens", 0)
