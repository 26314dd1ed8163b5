"""The plan with the least expected error, within 0.1 %, over samplings and mechanisms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from corrnoise import _checks as checks
from corrnoise import mechanisms as _mechanisms
from corrnoise import workloads
from corrnoise._progress import Progress, Share
from corrnoise._threads import one_blas_thread, pool
from corrnoise.accounting import Draws
from corrnoise.mechanisms import Candidate, Family, Question
from corrnoise.noise.generator.stream import check_rounds
from corrnoise.participation import Participation
from corrnoise.planning.advice import advice
from corrnoise.planning.choosing import EQUAL, choice
from corrnoise.planning.plans import Plan
from corrnoise.planning.pricing import CERTIFICATE, Built, Priced, Pricing
from corrnoise.planning.verification import trust
from corrnoise.samplings import ASSUMED, BEST, Sampling
from corrnoise.samplings import get as get_sampling
from corrnoise.samplings import names as sampling_names

# The most certificates that are drawn; they share the failure probability.
_FINALISTS = 3
# Estimates within this factor of the least error are drawn again; it is two standard errors.
_CLOSE = 1.01


@one_blas_thread()
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
    sampling: str | Sampling = BEST,
    allow: Sequence[str] | None = None,
    mechanisms: str | Sequence[str] | None = None,
    num_bands: int | None = None,
    num_parameters: int | None = None,
    memory: float | None = 0,
    rounds: int = 20,
    failure_probability: float = 1e-9,
    samples: int | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Plan:
    """The sampling and mechanism with the least expected error σ·‖B‖_F/√n, within 0.1 %.

    The noise of every mechanism is computed for every allowed sampling, with the amplification by
    random batches. An epoch has b = ⌈num_examples/batch_size⌉ steps. If computing a noise takes
    seconds, candidates are ranked by an estimate, and only the best few are computed. The noise of
    the plan itself is always exact, a proven bound or certified (``plan.calibration.kind``), for
    the float32 coefficients that are run.

    Errors within 0.1 % count as equal, and the cheaper mechanism is taken. The result does not
    depend on the number of cores.

    Args:
        num_examples: size of the dataset.
        batch_size: expected examples in a batch.
        epochs: passes over the data; give either this or ``num_steps``.
        num_steps: n, which need not be a multiple of b.
        epsilon: ε.
        delta: δ.
        momentum: β of the optimizer, m ← β·m + x̂.
        decay: α, the factor that the weights keep in one step; 1 is no decay.
        sampling: one of ``corrnoise.samplings.names()``, a ``Sampling``, or "best" to compare all.
        allow: with "best", the names of the samplings to choose from, such as ``["fixed"]`` where
            batches cannot be random and secret; all by default.
        mechanisms: names of families to choose from, or one name; all by default.
        num_bands: p of the banded families; several by default.
        num_parameters: the size of the model, to report how many bytes the noise keeps.
        memory: the model-sized float32 vectors that the noise may keep between steps. With 0, the
            default, it keeps none, as DP-SGD, BISR and Band-Inv-MF do: they regenerate past noise.
            BSR, Band-MF and BLT need a state; the alternatives show what more memory would gain.
            ``None`` is no limit.
        rounds: the number of ChaCha rounds: 20, or the faster 12 and 8.
        failure_probability: the failure probability of a certificate, if the sampling needs one.
        samples: the number of draws of a certificate; chosen from b by default.
        seed: the seed of these draws.
        progress: True for a bar on the terminal, or a function of (done, total).

    >>> import corrnoise as cn
    >>> plan = cn.plan(num_examples=1000, batch_size=100, epochs=4, epsilon=4, delta=1e-6,
    ...                sampling="fixed")
    >>> plan.mechanism, round(plan.error, 2), round(plan.efficiency, 2), plan.calibration.kind
    (band_inv_mf(prefix_sum(40), num_bands=32), 5.27, 0.93, 'bound')
    >>> cn.Plan.from_json(plan.to_json()) == plan
    True
    """
    epsilon = checks.number("epsilon", epsilon, 0.0, open_low=True)
    delta = checks.probability("delta", delta)
    if memory is not None:
        memory = checks.number("memory", memory, 0.0)
    if num_parameters is not None:
        checks.integer("num_parameters", num_parameters, 1)
    rounds = check_rounds(rounds)
    names = [mechanisms] if isinstance(mechanisms, str) else mechanisms
    draws = Draws.checked(failure_probability, samples, seed, progress)
    problems: list[_Problem] = []
    for how in _samplings(sampling, allow, num_examples, batch_size, num_steps):
        part = participation(
            num_examples, batch_size, epochs=epochs, num_steps=num_steps, sampling=how
        )
        if num_bands is not None:
            checks.integer("num_bands", num_bands, 1)
            checks.integer("num_bands", num_bands, 1, part.num_steps, "lower it or take more steps")
        question = Question(
            workloads.sgd(part.num_steps, momentum=momentum, decay=decay),
            part,
            how.amplification,
            epsilon,
            delta,
            memory,
            num_bands,
            named=names is not None,
        )
        pricing = Pricing(part, epsilon, delta, how, memory, rounds, num_bands is not None, draws)
        problems.append(_Problem(pricing, _candidates(question, names)))
    count = sum(len(problem.candidates) for problem in problems)
    share = Share(draws.progress, count + _FINALISTS * CERTIFICATE)
    priced: list[Priced] = []
    for each in _priced(problems):
        priced.append(each)
        share.advance(1)
    pricings = {p.pricing.sampling.name: p.pricing for p in problems}
    _estimate_again(priced, pricings)
    _certify_the_best(priced, pricings, share)
    share.finish()
    priced.sort(key=lambda p: p.error)
    chosen = _choose(priced)
    if len(problems) > 1:
        # A mechanism that one sampling has no analysis for is an alternative of another sampling.
        priced = [p for p in priced if not p.refused]
    assert chosen.calibration is not None
    assert chosen.alternative.scheme is not None
    how, part = chosen.calibration.sampling, chosen.calibration.participation
    workload = chosen.calibration.mechanism.workload
    alternatives = tuple(p.alternative for p in priced)
    found = Plan(
        num_examples=num_examples,
        batch_size=batch_size,
        calibration=chosen.calibration,
        lower_bound=how.least_error(workload, part, epsilon, delta),
        alternatives=alternatives,
        choice=priced.index(chosen),
        num_parameters=num_parameters,
        memory=chosen.alternative.scheme.num_vectors if memory is None else memory,
        rounds=rounds,
        advice=advice(
            chosen.calibration,
            alternatives,
            replace(draws, progress=None),
            steps_may_change=part.num_steps % part.min_sep == 0 and num_bands is None,
        ),
    )
    trust(found)  # its noise was computed just now
    return found


@dataclass(frozen=True)
class _Problem:
    """The candidates of one sampling, and the budget and limits that they are priced for."""

    pricing: Pricing
    candidates: list[tuple[Family, Candidate]]


def _samplings(
    sampling: str | Sampling,
    allow: Sequence[str] | None,
    num_examples: int,
    batch_size: int,
    num_steps: int | None,
) -> list[Sampling]:
    """The samplings to choose from; with "best", those that allow a run of this length."""
    if sampling != BEST:
        if allow is not None:
            raise ValueError(
                f"allow must be left out unless sampling='best', got {allow!r} for "
                f"sampling={str(sampling)!r}; drop one of them"
            )
        return [get_sampling(sampling)]
    names = sampling_names() if allow is None else allow
    if isinstance(names, str) or not names:
        raise ValueError(f"allow must be a list of samplings, got {names!r}; try ['fixed']")
    every = [get_sampling(name) for name in names]
    shorter = num_steps is not None and num_steps * batch_size < num_examples
    fitting = [each for each in every if each.partial_epoch or not shorter]
    return fitting or every  # if none fits, ``participation`` raises with the reason


def participation(
    num_examples: int,
    batch_size: int,
    *,
    epochs: int | None = None,
    num_steps: int | None = None,
    sampling: str | Sampling = ASSUMED,
) -> Participation:
    """The participation (n, b, k) of a run whose epochs use each example once.

    An epoch has b = ⌈num_examples/batch_size⌉ steps, and k = ⌈n/b⌉. Give either ``epochs`` or
    ``num_steps``. Only fixed batches allow a run of less than one epoch.

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
    """All candidates of the named families; by default all, or the banded ones if p is given."""
    if names is not None:
        chosen = [_mechanisms.get(name) for name in names]
    else:
        every = _mechanisms.families()
        chosen = [f for f in every if f.banded or question.num_bands is None]
    return [(family, each) for family in chosen for each in family.candidates(question)]


def _priced(problems: Sequence[_Problem]) -> Iterator[Priced]:
    """All candidates in the order of the problems, priced on all cores."""
    built = Built()
    work = [(p.pricing, *candidate) for p in problems for candidate in p.candidates]
    with pool() as threads:
        # Searches under amplification take longest, so they begin first.
        order = sorted(range(len(work)), key=lambda i: not work[i][2].note)
        futures = {i: threads.submit(work[i][0].price, *work[i][1:], built) for i in order}
        for i in range(len(work)):
            yield futures[i].result()


def _estimate_again(priced: list[Priced], pricings: Mapping[str, Pricing]) -> None:
    """Estimate again the candidates close to the least error, until all close ones were."""
    known: set[int] = set()
    while True:
        usable = [i for i, p in enumerate(priced) if p.available and p.mechanism is not None]
        least = min((priced[i].error for i in usable), default=math.inf)
        close = [i for i in usable if priced[i].error <= _CLOSE * least]
        left = [i for i in close if i not in known and priced[i].calibration is None]
        if not left or len(close) == 1:
            return
        with pool() as threads:
            asked = [(pricings[priced[i].alternative.sampling], priced[i]) for i in left]
            found = threads.map(lambda each: each[0].again(each[1]), asked)
            for i, each in zip(left, found, strict=True):
                priced[i] = each
        known.update(left)


def _certify_the_best(priced: list[Priced], pricings: Mapping[str, Pricing], share: Share) -> None:
    """Certify the candidate with the least estimate, until a proven one has the least error.

    Only a candidate whose estimate is better by more than 0.1 % is certified.
    """
    for _ in range(_FINALISTS):
        usable = [p for p in priced if p.available and p.mechanism is not None]
        proven = min((p.error for p in usable if p.calibration is not None), default=math.inf)
        best = min(
            (p for p in usable if p.calibration is None), key=lambda p: p.error, default=None
        )
        if best is None or best.error * EQUAL >= proven:
            return
        assert best.mechanism is not None
        pricing = pricings[best.alternative.sampling]
        found = pricing.certify(best.mechanism, _FINALISTS, share)
        priced[priced.index(best)] = best.calibrated(found)
        share.advance(CERTIFICATE)


def _choose(priced: list[Priced]) -> Priced:
    """The cheapest of the candidates within 0.1 % of the least error; raises if there is none."""
    found = choice([p.alternative for p in priced])
    if found is None:
        reasons = "; ".join(f"{p.alternative.label}: {p.alternative.reason}" for p in priced)
        asked = sorted({p.alternative.sampling for p in priced})
        raise ValueError(
            f"mechanisms must contain one that can be used with sampling={', '.join(asked)}, got "
            f"none ({reasons}); name others, allow more memory or change the sampling"
        )
    return priced[found]
