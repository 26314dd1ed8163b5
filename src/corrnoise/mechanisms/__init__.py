"""Factorizations A = BC of a workload: each family is a function that returns a frozen mechanism.

Every function of a family takes a workload, a participation, and its size by keyword. Closed forms
do not need the participation.
"""

from corrnoise.mechanisms.amplified import BAND_INV_MF, amplified_band_inv_mf
from corrnoise.mechanisms.banded import BAND_MF, band_mf
from corrnoise.mechanisms.banded_inverse import band_inv_mf
from corrnoise.mechanisms.buffered import BLT, blt
from corrnoise.mechanisms.dense import DENSE, dense
from corrnoise.mechanisms.fractional import BIFR, amplified_bifr, bifr
from corrnoise.mechanisms.matrix import DenseMechanism
from corrnoise.mechanisms.mechanism import Mechanism, Optimization
from corrnoise.mechanisms.previous import LAMBDA_CGD, amplified_lambda_cgd, lambda_cgd
from corrnoise.mechanisms.registry import (
    Candidate,
    Family,
    Question,
    build,
    families,
    get,
    names,
    register,
    shown,
)
from corrnoise.mechanisms.square_root import BISR, BSR, DP_SGD, bisr, bsr, dp_sgd, square_root
from corrnoise.mechanisms.toeplitz import ToeplitzMechanism

register(DP_SGD, BSR, BAND_MF, LAMBDA_CGD, BISR, BIFR, BAND_INV_MF, BLT, DENSE)

__all__ = [
    "Candidate",
    "DenseMechanism",
    "Family",
    "Mechanism",
    "Optimization",
    "Question",
    "ToeplitzMechanism",
    "amplified_band_inv_mf",
    "amplified_bifr",
    "amplified_lambda_cgd",
    "band_inv_mf",
    "band_mf",
    "bifr",
    "bisr",
    "blt",
    "bsr",
    "build",
    "dense",
    "dp_sgd",
    "families",
    "get",
    "lambda_cgd",
    "names",
    "register",
    "shown",
    "square_root",
]
