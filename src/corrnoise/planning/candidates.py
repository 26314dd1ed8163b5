"""What a plan chooses from: families of mechanisms, each at a few sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from corrnoise import checks, mechanisms
from corrnoise.accounting import Sampling
from corrnoise.mechanisms import DenseMechanism, Mechanism
from corrnoise.mechanisms.by_name import BANDED, NAMES
from corrnoise.participation import Participation
from corrnoise.planning.amplified import amplified_band_inv_mf
from corrnoise.workloads import Workload

# A dense factorization of more steps takes longer than all other candidates together.
_LARGEST_DENSE = 128
# With no memory a band of C⁻¹ costs a draw for each parameter and step, so the default has no more.
MOST_BANDS = 32
_BISR_BANDS = (2, 4, 8, 11, 16, 23, MOST_BANDS)
_BAND_INV_MF_BANDS = (2, 4, 16, MOST_BANDS)
# Those optimised under amplification, and the n·b up to which each takes seconds.
_AMPLIFIED_BANDS = {4: 10**6, 16: 2 * 10**5}
_BUFFERS = (1, 2, 4)


@dataclass(frozen=True)
class Candidate:
    """A mechanism that has not been built yet.

    Attributes:
        name: its family.
        size: the number of bands, or of buffers; ``None`` for "dense".
        workload: A.
        tuned: the participation to optimise for.
        budget: (ε, δ), where it is optimised for the noise of balls-in-bins at this budget.
        note: says so where it is not optimised for the sensitivity of the run itself.
    """

    name: str
    size: int | None
    workload: Workload
    tuned: Participation
    budget: tuple[float, float] | None = None
    note: str = ""

    @property
    def label(self) -> str:
        """Family, size and what it is tuned for, to print."""
        size = "" if self.size is None else f" {'d' if self.name == 'blt' else 'p'}={self.size}"
        return self.name + ("" if self.name == "dp_sgd" else size) + self.note

    @property
    def num_bands(self) -> int | None:
        """p; ``None`` for families that have no bands."""
        return None if self.name == "blt" else self.size

    def build(self) -> Mechanism | DenseMechanism:
        """The mechanism."""
        if self.budget is None or self.size is None:
            return mechanisms.build(self.name, self.workload, self.tuned, self.size)
        epsilon, delta = self.budget
        return amplified_band_inv_mf(
            self.workload, self.tuned, self.size, epsilon=epsilon, delta=delta
        )


def candidates(
    workload: Workload,
    participation: Participation,
    sampling: Sampling,
    *,
    budget: tuple[float, float],
    memory: float | None,
    families: Sequence[str] | None,
    num_bands: int | None,
) -> Iterator[Candidate]:
    """Every candidate.

    Args:
        workload: A.
        participation: n, b, k.
        sampling: amplification asks for other sizes than fixed batches do.
        budget: (ε, δ).
        memory: as in ``plan``; a banded C is tried at the size that just fits.
        families: names; all by default, or the banded ones where ``num_bands`` is given.
        num_bands: this p alone.
    """
    n = workload.num_steps
    for name in families or ():
        checks.choice("mechanisms", name, NAMES)
    if num_bands is not None:
        checks.integer("num_bands", num_bands, 1, n, "lower num_bands or raise the steps")
    if families is None:
        families = NAMES if num_bands is None else BANDED
        if n > _LARGEST_DENSE:
            families = [name for name in families if name != "dense"]
    for name in families:
        tunings = [participation]
        if name == "blt" and memory != 0 and sampling == "balls-in-bins":
            tunings += _shorter(participation)
        for tuned in tunings:
            note = "" if tuned == participation else f", tuned for b={tuned.min_sep}"
            asked = num_bands is not None and name in BANDED
            sizes = [num_bands] if asked else _sizes(name, workload, tuned, sampling, memory)
            for size in sizes:
                yield Candidate(name, size, workload, tuned, note=note)
        if name == "band_inv_mf" and sampling == "balls-in-bins":
            for size in _amplified_bands(participation, num_bands):
                yield Candidate(name, size, workload, participation, budget, ", amplified")


def _sizes(
    name: str,
    workload: Workload,
    participation: Participation,
    sampling: Sampling,
    memory: float | None,
) -> Sequence[int | None]:
    n = workload.num_steps
    if name == "dense":
        return [None]
    if name == "dp_sgd":
        return [1]
    if name == "blt":
        return [d for d in _BUFFERS if d <= n]
    if name == "bisr":
        best = mechanisms.bisr(workload, "best", participation).num_bands
        return sorted({*(p for p in _BISR_BANDS if p <= n), best})
    if name == "band_inv_mf":
        return _band_inv_mf_bands(participation, sampling)
    return _strategy_bands(participation.min_sep, sampling, memory)


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


def _shorter(participation: Participation) -> list[Participation]:
    """Shorter separations to optimise for.

    Amplification favours a C that forgets sooner, which a shorter separation brings about.
    """
    n, b = participation.num_steps, participation.min_sep
    return [Participation(n, b // share, -(-n // (b // share))) for share in (2, 4) if b >= share]


def _amplified_bands(participation: Participation, num_bands: int | None) -> list[int]:
    """Sizes to optimise under amplification: as many as the time of a plan allows."""
    if num_bands is not None:
        return [num_bands]
    n, b = participation.num_steps, participation.min_sep
    return [p for p, most in _AMPLIFIED_BANDS.items() if p <= n and n * b <= most]


def _band_inv_mf_bands(tuned: Participation, sampling: Sampling) -> list[int]:
    """Sizes of Band-Inv-MF.

    Balls-in-bins needs a C with no negative entry, which wide optimised bands seldom have.
    """
    most = tuned.num_steps if sampling == "fixed" else max(2, tuned.min_sep // 4)
    return [p for p in _BAND_INV_MF_BANDS if p <= min(most, tuned.num_steps)]
