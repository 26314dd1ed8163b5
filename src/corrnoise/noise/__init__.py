"""Correlated Gaussian noise that is made again instead of stored."""

from corrnoise.noise.correlated import CorrelatedNoise
from corrnoise.noise.key import Key
from corrnoise.noise.scheme import Scheme
from corrnoise.noise.stream import NoiseStream

__all__ = ["CorrelatedNoise", "Key", "NoiseStream", "Scheme"]
