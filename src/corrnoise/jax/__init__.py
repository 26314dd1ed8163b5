"""Correlated noise for JAX: an optax transformation with the stream of the other backends."""

from corrnoise import _extras

try:
    from corrnoise.jax.transformation import NoiseState, correlated_noise, secret_words
except ModuleNotFoundError as missing:
    raise _extras.explained(missing) from None

__all__ = ["NoiseState", "correlated_noise", "secret_words"]
