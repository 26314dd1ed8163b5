"""Samplings: how the batches of a run are drawn, and what that costs in privacy.

    fixed            the dataset is cut once into b parts; step i takes part i mod b
    balls-in-bins    each example falls into one of b bins, uniformly; step i takes bin i mod b
    poisson          each example takes part in each step with probability 1/b
    random-allocation
                     in each epoch each example takes part in one of its b steps, uniformly
    cyclic-poisson   each example falls into one of p groups; step i takes each example of group
                     i mod p with probability p/b

``docs/extending.md`` shows how to add one.
"""

from corrnoise.samplings.balls_in_bins import BALLS_IN_BINS
from corrnoise.samplings.batches import Batches, random_words
from corrnoise.samplings.calibration import Calibration
from corrnoise.samplings.fixed import FIXED
from corrnoise.samplings.functions import ASSUMED, BEST, DRAWN, account, calibrate
from corrnoise.samplings.poisson import CYCLIC_POISSON, POISSON
from corrnoise.samplings.random_allocation import RANDOM_ALLOCATION
from corrnoise.samplings.sampling import Sampling, get, names, objections, register, require

register(FIXED, BALLS_IN_BINS, POISSON, RANDOM_ALLOCATION, CYCLIC_POISSON)

__all__ = [
    "ASSUMED",
    "BALLS_IN_BINS",
    "BEST",
    "CYCLIC_POISSON",
    "DRAWN",
    "FIXED",
    "POISSON",
    "RANDOM_ALLOCATION",
    "Batches",
    "Calibration",
    "Sampling",
    "account",
    "calibrate",
    "get",
    "names",
    "objections",
    "random_words",
    "register",
    "require",
]
