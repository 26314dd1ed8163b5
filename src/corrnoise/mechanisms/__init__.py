"""Factorizations A = BC of a workload, each a function that returns a frozen mechanism."""

from corrnoise.mechanisms.banded import band_mf
from corrnoise.mechanisms.banded_inverse import band_inv_mf
from corrnoise.mechanisms.buffered import blt
from corrnoise.mechanisms.by_name import NAMES, build
from corrnoise.mechanisms.dense import dense
from corrnoise.mechanisms.mechanism import DenseMechanism, Mechanism, Optimization
from corrnoise.mechanisms.square_root import bisr, bsr, dp_sgd, square_root

__all__ = [
    "NAMES",
    "DenseMechanism",
    "Mechanism",
    "Optimization",
    "band_inv_mf",
    "band_mf",
    "bisr",
    "blt",
    "bsr",
    "build",
    "dense",
    "dp_sgd",
    "square_root",
]
