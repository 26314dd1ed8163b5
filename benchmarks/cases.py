"""What is measured: our mechanisms, at which sizes, and beside what of jax-privacy."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PARTICIPATIONS = 4
SIZES = tuple(4**i for i in range(5, 11))  # 1,024 to 1,048,576
CLOSED_FORM_SIZES = (2**10, 2**14, 2**20)
COMPARED_AT = 4096  # where the targets compare
QUICK_LARGEST = 4096

BAND_MF = "band_mf p=b"
BAND_INV_MF = "band_inv_mf p=4"
BAND_INV_MF_WIDE = "band_inv_mf p=64"
BLT = "blt d=4"
BISR_BEST = "bisr best"
BISR = "bisr p=4"
BSR = "bsr p=b"
DENSE = "dense"

BANDED_TOEPLITZ = "optimize_banded_toeplitz"
LISTING = "listing, 20 steps"
LISTING_LONG = "listing, 250 steps"
LEAN = "lean listing, 20 steps"
LEAN_LONG = "lean listing, 250 steps"
BUFFERED = "buffered_toeplitz.optimize"
NOISING_COEFS = "optimal_max_error_noising_coefs"
STRATEGY_COEFS = "optimal_max_error_strategy_coefs"
DENSE_EPOCHS = "dense.optimize, epochs=k"
DENSE_BANDED = "dense.optimize, bands=b"


@dataclass(frozen=True)
class Rival:
    """One way to do the same with jax-privacy.

    Attributes:
        name: what it is called in the tables and in ``theirs.py``.
        largest: the largest n to try.
        quick: whether a quick run measures it too.
    """

    name: str
    largest: int = SIZES[-1]
    quick: bool = True


@dataclass(frozen=True)
class Case:
    """One mechanism of ours, its sizes and its rivals; ``quick`` as for a rival."""

    name: str
    sizes: tuple[int, ...] = SIZES
    rivals: tuple[Rival, ...] = ()
    quick: bool = True


CASES = (
    Case(BAND_MF, rivals=(Rival(BANDED_TOEPLITZ),)),
    Case(
        BAND_INV_MF,
        rivals=(
            Rival(LISTING),
            Rival(LISTING_LONG, largest=1024, quick=False),
            Rival(LEAN),
            Rival(LEAN_LONG, quick=False),
        ),
    ),
    Case(BAND_INV_MF_WIDE, sizes=(2**14,)),
    Case(BLT, rivals=(Rival(BUFFERED),)),
    Case(BISR_BEST),
    Case(BISR, CLOSED_FORM_SIZES, (Rival(NOISING_COEFS, quick=False),)),
    Case(BSR, CLOSED_FORM_SIZES, (Rival(STRATEGY_COEFS, quick=False),)),
    Case(DENSE, (256,), (Rival(DENSE_EPOCHS), Rival(DENSE_BANDED)), quick=False),
)


def selected(quick: bool) -> tuple[Case, ...]:
    """The cases of a full or of a quick run; those with no size left are dropped."""
    if not quick:
        return CASES
    small = (
        Case(
            case.name,
            tuple(n for n in case.sizes if n <= QUICK_LARGEST),
            tuple(rival for rival in case.rivals if rival.quick),
        )
        for case in CASES
        if case.quick
    )
    return tuple(case for case in small if case.sizes)
