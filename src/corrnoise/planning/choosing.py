"""The choice among alternatives: the cheapest of those with nearly the least error."""

from __future__ import annotations

import math
from collections.abc import Sequence

from corrnoise.planning.plans import Alternative

# Errors this close count as equal, and the cheaper mechanism is taken.
EQUAL = 1.001


def choice(alternatives: Sequence[Alternative]) -> int | None:
    """The index of the alternative to choose; ``None`` where none can be chosen.

    Alternatives whose noise is not proven cannot be chosen. Among the others, those within 0.1 % of
    the least error count as equal. Of these, the one with the cheapest step is chosen; if several
    have the same cost, the one with the least error among them.
    """
    errors = {i: each.error for i, each in enumerate(alternatives) if each.error is not None}
    ready = [i for i in errors if not alternatives[i].reason and _proven(alternatives[i])]
    least = min((errors[i] for i in ready), default=math.inf)
    equal = [i for i in ready if errors[i] <= EQUAL * least]
    return min(equal, key=lambda i: (_cost(alternatives[i]), errors[i]), default=None)


def _proven(alternative: Alternative) -> bool:
    return alternative.kind not in (None, "estimate")


def _cost(alternative: Alternative) -> float:
    return math.inf if alternative.step_cost is None else alternative.step_cost
