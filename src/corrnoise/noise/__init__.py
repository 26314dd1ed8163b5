"""Correlated Gaussian noise that is regenerated instead of stored."""

from corrnoise.noise.correlated import CorrelatedNoise
from corrnoise.noise.filtering.scheme import Scheme
from corrnoise.noise.generator.key import Key
from corrnoise.noise.generator.normals import truncation
from corrnoise.noise.generator.stream import NoiseStream

__all__ = ["CorrelatedNoise", "Key", "NoiseStream", "Scheme", "truncation"]
