"""The advice of a plan, in one line: the change that would lower its error most.

More memory and other samplings have the same steps, so their errors are known from planning. Twice
the batch size or twice the epochs change the steps. There the noise in the weights is divided by
the weights that equal gradients would give, both as root mean squares over all steps, as weight
decay shrinks both.

These two changes are estimated with the best of several mechanisms that need no search, or with
DP-SGD if the plan has independent noise. A single mechanism would be misleading: one with too few
bands for n steps has less error with n/2 steps, but a plan chooses the number of bands and gains
nothing by that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from corrnoise import mechanisms, workloads
from corrnoise._rounding import counted
from corrnoise.accounting import Draws
from corrnoise.mechanisms import Mechanism
from corrnoise.participation import Participation
from corrnoise.planning.plans import Alternative
from corrnoise.samplings import Calibration
from corrnoise.workloads import Workload

# A change that lowers the error by a smaller fraction is not mentioned.
_WORTH = 0.02
# Estimates beyond this many steps or bins would take seconds.
_MOST_STEPS, _MOST_BINS = 10_000, 300
_BANDS = (4, 16, 64, 256)


@dataclass(frozen=True)
class _Change:
    """A change of the request, and the error after it, relative to the plan's error."""

    words: str
    ratio: float


def advice(
    chosen: Calibration,
    alternatives: tuple[Alternative, ...],
    draws: Draws,
    *,
    steps_may_change: bool,
) -> str:
    """The change that gives the least error, in words; "" if no change gains enough.

    Args:
        chosen: the plan's mechanism and its price.
        alternatives: the alternatives of the plan.
        draws: the settings of estimates.
        steps_may_change: whether other batch sizes and epochs are compared; only if the run has
            whole epochs and the planner chose the number of bands.
    """
    found = _memory(chosen, alternatives)
    if steps_may_change:
        found += _longer(chosen, draws)
    best = min(found, key=lambda change: change.ratio, default=None)
    if best is None or best.ratio > 1.0 - _WORTH:
        return ""
    return f"{best.words}: about {100 * (1 - best.ratio):.0f} % less error"


def _memory(chosen: Calibration, alternatives: tuple[Alternative, ...]) -> list[_Change]:
    """The gain by mechanisms that need more memory than the plan allows."""
    result: list[_Change] = []
    for each in alternatives:
        if each.reason and each.error is not None and each.scheme is not None:
            vectors = each.scheme.num_vectors
            words = f"memory for {counted(vectors, 'model-sized vector')}"
            if vectors:
                result.append(
                    _Change(f"{words} ({each.label}, {each.sampling})", each.error / chosen.error)
                )
    return result


def _longer(chosen: Calibration, draws: Draws) -> list[_Change]:
    """The gain by twice the batch size or twice the epochs, by estimates, where there are any."""
    part = chosen.participation
    n, b, k = part.num_steps, part.min_sep, part.max_participations
    if n > _MOST_STEPS or b > _MOST_BINS or b < 4:
        return []
    half = -(-b // 2)
    changed = {
        "twice the batch size with as many epochs, so half the steps": Participation(
            half * k, half, k
        ),
        "twice the epochs at the same ε and δ": Participation(2 * n, b, 2 * k),
    }
    base = _error(chosen, part, draws)
    if math.isinf(base):
        return []
    return [_Change(words, _error(chosen, other, draws) / base) for words, other in changed.items()]


def _error(chosen: Calibration, part: Participation, draws: Draws) -> float:
    """The estimated error divided by the weights that equal gradients give, up to a factor.

    It is infinite if the sampling has no analysis for any of the mechanisms.
    """
    whole, how = chosen.mechanism.workload, chosen.sampling
    workload = workloads.sgd(part.num_steps, momentum=whole.momentum or 0.0, decay=whole.decay or 1)

    def price(mechanism: Mechanism) -> float:
        if how.objection(mechanism, part):
            return math.inf
        noise = how.estimate(mechanism, part, chosen.epsilon, chosen.delta, draws)
        return noise * mechanism.decoder_rms

    least = price(mechanisms.dp_sgd(workload))
    if not chosen.mechanism.independent:
        # Mechanisms with few bands of C⁻¹; or with few bands of C if the sampling requires that.
        short = price(mechanisms.lambda_cgd(workload, part))
        short = min(short, _best(mechanisms.bisr, workload, part, price))
        if math.isinf(short):
            short = _best(mechanisms.bsr, workload, part, price)
        least = min(least, short)
    batch = 1.0 / part.min_sep  # the fraction of all examples
    given = batch * float(np.sqrt(np.mean(np.cumsum(workload.coef) ** 2)))
    return least / given


def _best(
    make: Callable[..., Mechanism],
    workload: Workload,
    part: Participation,
    price: Callable[[Mechanism], float],
) -> float:
    """The least price in a family, whose members with more bands are tried while they improve."""
    least = math.inf
    for bands in sorted({min(bands, part.min_sep) for bands in _BANDS}):
        error = price(make(workload, num_bands=bands))
        if error > least:
            break
        least = error
    return least
