"""What would lower the error of a plan most, in one line.

The noise in the weights is compared with the gradients that they sum: an error is divided by the
number of times that the run uses an example, n·batch. Memory and other samplings are compared by
the prices that the planner has. Twice the batch size and twice the epochs are estimated with the
best of some mechanisms that need no search, or DP-SGD where the plan is independent noise. One of
them alone would mislead: what has too few bands for n steps has less error with n/2 steps, and a
plan, which chooses the number of bands, gains nothing by that.
"""

from __future__ import annotations

from dataclasses import dataclass

from corrnoise import mechanisms, workloads
from corrnoise.accounting import Draws
from corrnoise.mechanisms import Mechanism
from corrnoise.participation import Participation
from corrnoise.planning.plans import Alternative
from corrnoise.samplings import Calibration

# A change that lowers the error by less is not worth a line.
_WORTH = 0.02
# Estimates beyond this many steps or bins would take seconds.
_MOST_STEPS, _MOST_BINS = 10_000, 300
_BANDS = (4, 16, 64)


@dataclass(frozen=True)
class _Change:
    """A change of the request, and the error that it leaves, relative to the plan's."""

    words: str
    ratio: float


def advice(
    chosen: Calibration, alternatives: tuple[Alternative, ...], draws: Draws, *, whole_epochs: bool
) -> str:
    """The change with the least error, in words; "" where none is worth it."""
    found = _memory(chosen, alternatives)
    if whole_epochs:
        found += _longer(chosen, draws)
    best = min(found, key=lambda change: change.ratio, default=None)
    if best is None or best.ratio > 1.0 - _WORTH:
        return ""
    return f"{best.words}: about {100 * (1 - best.ratio):.0f} % less error"


def _memory(chosen: Calibration, alternatives: tuple[Alternative, ...]) -> list[_Change]:
    """Mechanisms that need more memory than the plan allows."""
    result: list[_Change] = []
    for each in alternatives:
        if each.reason and each.error is not None and each.scheme is not None:
            vectors = each.scheme.num_vectors
            words = f"memory for {vectors} model-sized vector{'s' * (vectors != 1)}"
            if vectors:
                result.append(
                    _Change(f"{words} ({each.label}, {each.sampling})", each.error / chosen.error)
                )
    return result


def _longer(chosen: Calibration, draws: Draws) -> list[_Change]:
    """Twice the batch size and twice the epochs, by estimates."""
    part = chosen.participation
    n, b, k = part.num_steps, part.min_sep, part.max_participations
    if n > _MOST_STEPS or b > _MOST_BINS or b < 4:
        return []
    base = _error(chosen, part, draws)
    larger = _error(chosen, Participation(-(-b // 2) * k, -(-b // 2), k), draws)
    more = _error(chosen, Participation(2 * n, b, 2 * k), draws)
    return [
        _Change("twice the batch size with as many epochs, so half the steps", larger / base),
        _Change("twice the epochs at the same ε and δ", more / (2.0 * base)),
    ]


def _error(chosen: Calibration, part: Participation, draws: Draws) -> float:
    """The estimated error that is left with this participation."""
    whole, how = chosen.mechanism.workload, chosen.sampling
    workload = workloads.sgd(part.num_steps, momentum=whole.momentum or 0.0, decay=whole.decay or 1)
    tried: list[Mechanism] = [mechanisms.dp_sgd(workload)]
    if not chosen.mechanism.independent:
        widths = sorted({min(bands, part.min_sep) for bands in _BANDS})
        short = [mechanisms.lambda_cgd(workload, part)]
        short += [mechanisms.bisr(workload, num_bands=bands) for bands in widths]
        if all(how.objection(each, part) for each in short):  # it needs a C with few bands
            short = [mechanisms.bsr(workload, num_bands=bands) for bands in widths]
        tried += short
    return min(
        how.estimate(each, part, chosen.epsilon, chosen.delta, draws) * each.decoder_rms
        for each in tried
        if not how.objection(each, part)
    )
