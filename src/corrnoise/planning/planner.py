"""The plan with the least expected error for a dataset, a budget and a memory limit."""

from __future__ import annotations

from collections.abc import Sequence

from corrnoise import _checks as checks
from corrnoise import mechanisms as _mechanisms
from corrnoise import workloads
from corrnoise._progress import Progress, Share
from corrnoise.accounting import Draws
from corrnoise.mechanisms import Candidate, Family, Question
from corrnoise.noise.generator.stream import check_rounds
from corrnoise.participation import Participation
from corrnoise.planning.plans import Plan
from corrnoise.planning.pricing import CERTIFICATE, Priced, Pricing
from corrnoise.planning.verification import trust
from corrnoise.samplings import ASSUMED, DRAWN, Sampling
from corrnoise.samplings import get as get_sampling

# Of the candidates ranked by an estimate, this many are certified if they are close to the best.
_FINALISTS, _CLOSE = 3, 1.02
# Errors this close count as equal, and the cheaper mechanism is taken.
_EQUAL = 1.001


def plan(
    *,
    num_examples: int,
    batch_size: int,
    epochs: int | None = None,
    num_steps: int | None = None,
    epsilon: float,
    delta: float,
    momentum: float = 0.0,
    decay: float = 1.0,
    sampling: str | Sampling = DRAWN,
    mechanisms: Sequence[str] | None = None,
    num_bands: int | None = None,
    num_parameters: int | None = None,
    memory: float | None = 0,
    rounds: int = 20,
    failure_probability: float = 1e-9,
    samples: int | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Plan:
    """The mechanism with the least expected error σ·‖B‖_F/√n at the noise that the budget needs.

    Amplification by sampling counts: each candidate is priced for ``sampling``. An epoch has
    b = ⌈num_examples/batch_size⌉ steps; an example takes part at most once in each. Where prices
    are certified by draws, every candidate is ranked by an estimate and the best three are
    certified; the noise of the plan itself is always exact, a proven bound or certified. Mechanisms
    are priced with the float32 coefficients that are run. Errors within 0.1 % count as equal, and
    the cheaper mechanism is taken.

    Args:
        num_examples: size of the dataset.
        batch_size: expected examples in a batch.
        epochs: passes over the data; give either this or ``num_steps``.
        num_steps: n, which need not be whole epochs.
        epsilon: ε.
        delta: δ.
        momentum: β of the optimizer, m ← β·m + x̂.
        decay: α, the factor that the weights keep in one step; 1 is no decay.
        sampling: one of ``corrnoise.samplings.names()``, as in ``calibrate``, or a ``Sampling``.
        mechanisms: names of families to choose from; all by default.
        num_bands: p of the banded families; several by default.
        num_parameters: the size of the model, to report how many bytes the noise keeps.
        memory: the model-sized float32 vectors that the noise may keep between steps. With 0, the
            default, it keeps none, as DP-SGD, BISR and Band-Inv-MF do: they regenerate past noise.
            BSR, Band-MF and BLT need a state; the alternatives show what it would gain. ``None`` is
            no limit.
        rounds: the number of ChaCha rounds: 20, or the faster 12 and 8.
        failure_probability: that of the certificate, where prices are certified by draws.
        samples: draws for the certificate; chosen from b by default.
        seed: the seed of these draws.
        progress: True for a bar on the terminal, or a function of (done, total).

    >>> import corrnoise as cn
    >>> plan = cn.plan(num_examples=1000, batch_size=100, epochs=4, epsilon=4, delta=1e-6,
    ...                sampling="fixed")
    >>> plan.mechanism, round(plan.error, 3), round(plan.efficiency, 2), plan.calibration.kind
    (band_inv_mf(prefix_sum(40), num_bands=32), 5.274, 0.93, 'bound')
    >>> cn.Plan.from_json(plan.to_json()) == plan
    True
    """
    how = get_sampling(sampling)
    part = participation(num_examples, batch_size, epochs=epochs, num_steps=num_steps, sampling=how)
    workload = workloads.sgd(part.num_steps, momentum=momentum, decay=decay)
    epsilon = checks.number("epsilon", epsilon, 0.0, open_low=True)
    delta = checks.probability("delta", delta)
    if memory is not None:
        memory = checks.number("memory", memory, 0.0)
    if num_parameters is not None:
        checks.integer("num_parameters", num_parameters, 1)
    if num_bands is not None:
        checks.integer("num_bands", num_bands, 1, part.num_steps, "lower it or take more steps")
    rounds = check_rounds(rounds)
    draws = Draws.checked(failure_probability, samples, seed, progress)
    pricing = Pricing(part, epsilon, delta, how, memory, rounds, num_bands is not None, draws)
    question = Question(
        workload,
        part,
        how.amplification,
        epsilon,
        delta,
        memory,
        num_bands,
        named=mechanisms is not None,
    )
    tried = _candidates(question, mechanisms)
    certificates = _FINALISTS * CERTIFICATE if how.certified else 0
    share = Share(draws.progress, len(tried) + certificates)
    priced: list[Priced] = []
    for family, candidate in tried:
        priced.append(pricing.price(family, candidate))
        share.advance(1)
    if how.certified:
        priced = _certify(priced, pricing, share)
    share.finish()
    priced.sort(key=lambda p: p.error)
    chosen = _choose(priced, how)
    assert chosen.calibration is not None
    assert chosen.alternative.scheme is not None
    found = Plan(
        num_examples=num_examples,
        batch_size=batch_size,
        calibration=chosen.calibration,
        lower_bound=how.least_error(workload, part, epsilon, delta),
        alternatives=tuple(p.alternative for p in priced),
        choice=priced.index(chosen),
        num_parameters=num_parameters,
        memory=chosen.alternative.scheme.num_vectors if memory is None else memory,
        rounds=rounds,
    )
    trust(found)  # it was priced just now
    return found


def participation(
    num_examples: int,
    batch_size: int,
    *,
    epochs: int | None = None,
    num_steps: int | None = None,
    sampling: str | Sampling = ASSUMED,
) -> Participation:
    """How often one example takes part when every epoch uses each example once.

    b = ⌈num_examples/batch_size⌉ steps make an epoch, and k = ⌈n/b⌉. Only fixed batches allow a run
    of less than one epoch: the analysis of the other samplings uses every bin.

    >>> participation(50_000, 512, epochs=10)
    Participation(num_steps=980, min_sep=98, max_participations=10)
    """
    total = checks.integer("num_examples", num_examples, 1)
    size = checks.integer("batch_size", batch_size, 1, total, "at most num_examples")
    how = get_sampling(sampling)
    b = -(-total // size)
    if (epochs is None) == (num_steps is None):
        raise ValueError(
            f"exactly one of epochs and num_steps must be given, got epochs={epochs!r} and "
            f"num_steps={num_steps!r}; an epoch has {b} steps"
        )
    if epochs is not None:
        n = b * checks.integer("epochs", epochs, 1)
    else:
        n = checks.integer("num_steps", num_steps, 1)
    if n < b and not how.partial_epoch:
        raise ValueError(
            f"num_steps must be at least one epoch, {b}, with sampling={how.name!r}, got {n}; take "
            "more steps, larger batches or sampling='fixed'"
        )
    return Participation(n, min(b, n), -(-n // b))


def _candidates(question: Question, names: Sequence[str] | None) -> list[tuple[Family, Candidate]]:
    """Every candidate of the named families; all by default, or the banded ones for a given p."""
    if names is not None:
        chosen = [_mechanisms.get(name) for name in names]
    else:
        every = _mechanisms.families()
        chosen = [f for f in every if f.banded or question.num_bands is None]
    return [(family, each) for family in chosen for each in family.candidates(question)]


def _certify(priced: list[Priced], pricing: Pricing, share: Share) -> list[Priced]:
    """The same candidates; the best of the available ones have a certificate."""
    ranked = sorted((p for p in priced if p.available), key=lambda p: p.error)[:_FINALISTS]
    finalists = [p for p in ranked if p.error <= _CLOSE * ranked[0].error]
    result = [p for p in priced if p not in finalists]
    for finalist in finalists:
        assert finalist.mechanism is not None
        found = pricing.certify(finalist.mechanism, len(finalists), share)
        result.append(finalist.calibrated(found))
        share.advance(CERTIFICATE)
    return result


def _choose(priced: list[Priced], sampling: Sampling) -> Priced:
    """The cheapest of the candidates within 0.1 % of the least error."""
    ready = [p for p in priced if p.available and p.calibration is not None]
    if not ready:
        reasons = "; ".join(f"{p.alternative.label}: {p.alternative.reason}" for p in priced)
        raise ValueError(
            f"mechanisms must contain one that can be used with sampling={sampling.name!r}, got "
            f"none ({reasons}); name others, allow more memory or change the sampling"
        )
    least = min(p.error for p in ready)
    equal = [p for p in ready if p.error <= _EQUAL * least]
    return min(equal, key=lambda p: (p.alternative.step_cost, p.error))
