"""What a plan chooses from: families of mechanisms, each at a few sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from corrnoise import checks, mechanisms
from corrnoise.accounting import Sampling
from corrnoise.mechanisms import DenseMechanism, Mechanism
from corrnoise.participation import Participation
from corrnoise.workloads import Workload

BANDED_STRATEGIES = ("bsr", "band_mf")
BANDED_INVERSES = ("bisr", "band_inv_mf")
FAMILIES = ("dp_sgd", *BANDED_STRATEGIES, *BANDED_INVERSES, "blt", "dense")

# A dense factorization of more steps takes longer than all other candidates together.
_LARGEST_DENSE = 128
# With no memory a band of C⁻¹ costs a draw for each parameter and step, so the default has no more.
MOST_BANDS = 32
_BISR_BANDS = (2, 4, 8, 11, 16, 23, MOST_BANDS)
_BAND_INV_MF_BANDS = (2, 4, 16, MOST_BANDS)
_BUFFERS = (1, 2, 4)


@dataclass(frozen=True)
class Candidate:
    """A mechanism that has not been built yet.

    Attributes:
        name: its family.
        num_bands: p; ``None`` for families that have no bands.
        label: family, size and what it was tuned for, to print.
        build: makes it.
    """

    name: str
    num_bands: int | None
    label: str
    build: Callable[[], Mechanism | DenseMechanism]


def candidates(
    workload: Workload,
    participation: Participation,
    sampling: Sampling,
    *,
    memory: float | None,
    families: Sequence[str] | None,
    num_bands: int | None,
) -> Iterator[Candidate]:
    """Every candidate, cheap ones first.

    Args:
        workload: A.
        participation: n, b, k.
        sampling: amplification asks for other sizes than fixed batches do.
        memory: as in ``plan``; a banded C is tried at the size that just fits.
        families: names; all by default, or the banded ones where ``num_bands`` is given.
        num_bands: this p alone.
    """
    n, b = workload.num_steps, participation.min_sep
    if families is None:
        families = FAMILIES if num_bands is None else (*BANDED_STRATEGIES, *BANDED_INVERSES)
    for name in families:
        checks.choice("mechanisms", name, FAMILIES)
    if num_bands is not None:
        checks.integer("num_bands", num_bands, 1, n, "lower num_bands or raise the steps")
    for name in FAMILIES:
        if name not in families:
            continue
        if name == "dp_sgd":
            yield Candidate(name, 1, name, partial(mechanisms.dp_sgd, workload))
        elif name == "blt":
            for d in (d for d in _BUFFERS if d <= n):
                build = partial(mechanisms.blt, workload, participation, d)
                yield Candidate(name, None, f"blt d={d}", build)
        elif name == "dense":
            if n <= _LARGEST_DENSE or len(families) == 1:
                build = partial(mechanisms.dense, workload, participation)
                yield Candidate(name, None, name, build)
        elif name == "bisr" and num_bands is None:
            yield from _bisr(workload, participation)
        elif name == "band_inv_mf":
            for tuned in _tunings(participation, sampling):
                sizes = _band_inv_mf_bands(tuned, sampling) if num_bands is None else [num_bands]
                yield from _band_inv_mf(workload, participation, tuned, sizes)
        else:
            sizes = _strategy_bands(b, sampling, memory) if num_bands is None else [num_bands]
            for p in sizes:
                build = {
                    "bsr": partial(mechanisms.bsr, workload, p),
                    "band_mf": partial(mechanisms.band_mf, workload, participation, p),
                    "bisr": partial(mechanisms.bisr, workload, p),
                }[name]
                yield Candidate(name, p, f"{name} p={p}", build)


def _strategy_bands(b: int, sampling: Sampling, memory: float | None) -> list[int]:
    """Sizes of a banded C.

    More bands mean less error, but with cyclic Poisson also less amplification.
    """
    sizes = {b}
    if memory is not None and 1 <= memory < b - 1:
        sizes.add(int(memory) + 1)
    if sampling == "cyclic-poisson":
        sizes |= {2**i for i in range(1, b.bit_length()) if 2**i < b}
    return sorted(sizes)


def _bisr(workload: Workload, participation: Participation) -> Iterator[Candidate]:
    best = mechanisms.bisr(workload, "best", participation).num_bands
    for p in sorted({*(p for p in _BISR_BANDS if p <= workload.num_steps), best}):
        yield Candidate("bisr", p, f"bisr p={p}", partial(mechanisms.bisr, workload, p))


def _tunings(participation: Participation, sampling: Sampling) -> list[Participation]:
    """What to optimise for.

    Amplification favours a C that forgets sooner, which a shorter separation brings about.
    """
    n, b = participation.num_steps, participation.min_sep
    shares = (1, 2, 4) if sampling == "balls-in-bins" else (1,)
    shorter = sorted({max(1, b // share) for share in shares}, reverse=True)
    return [participation, *(Participation(n, s, -(-n // s)) for s in shorter if s != b)]


def _band_inv_mf_bands(tuned: Participation, sampling: Sampling) -> list[int]:
    """Sizes of Band-Inv-MF.

    Balls-in-bins needs a C with no negative entry, which wide optimised bands seldom have.
    """
    most = tuned.num_steps if sampling == "fixed" else max(2, tuned.min_sep // 4)
    return [p for p in _BAND_INV_MF_BANDS if p <= min(most, tuned.num_steps)]


def _band_inv_mf(
    workload: Workload, participation: Participation, tuned: Participation, sizes: Sequence[int]
) -> Iterator[Candidate]:
    note = "" if tuned == participation else f", tuned for b={tuned.min_sep}"
    for p in sizes:
        build = partial(mechanisms.band_inv_mf, workload, tuned, p)
        yield Candidate("band_inv_mf", p, f"band_inv_mf p={p}{note}", build)
