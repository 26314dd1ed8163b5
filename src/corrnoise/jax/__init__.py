"""Private training with JAX: the stream, mechanisms and certificates of the other backends.

``correlated_noise`` is the noise as an optax transformation; ``PrivateRun`` puts key, ledger and
statement around it; ``clipped_sums`` clips by ``jax.vmap``; ``to_jax_privacy`` and
``from_jax_privacy`` exchange mechanisms with jax_privacy.
"""

from corrnoise import _extras

try:
    from corrnoise.jax.bridge import from_jax_privacy, to_jax_privacy
    from corrnoise.jax.clipping import clipped_sums
    from corrnoise.jax.run import PrivateRun
    from corrnoise.jax.transformation import NoiseState, correlated_noise, secret_words
except ModuleNotFoundError as missing:
    raise _extras.explained(missing) from None

__all__ = [
    "NoiseState",
    "PrivateRun",
    "clipped_sums",
    "correlated_noise",
    "from_jax_privacy",
    "secret_words",
    "to_jax_privacy",
]
