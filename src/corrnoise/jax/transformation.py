"""Correlated noise as an optax transformation: the state is the number of the next step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from corrnoise import _checks as checks
from corrnoise.jax.placement import Place, add_noise
from corrnoise.mechanisms import Mechanism
from corrnoise.noise import Key, NoiseStream
from corrnoise.noise.backends.targets import check_scale
from corrnoise.noise.filtering.filters import Filter
from corrnoise.planning import Plan

Array: TypeAlias = Any
Tree: TypeAlias = Any

# Blocks are numbered by one word of the state: 2^32 blocks of 16 indices.
_LARGEST = 1 << 36
_LARGEST_LEAF = (1 << 31) - 1
_KINDS = ("float32", "bfloat16")
# The leaves that have the noise of a key and stream, where optax masks the others.
_GROUPS: dict[tuple[str, int], tuple[str, ...]] = {}


class _Leaf(NamedTuple):
    """A leaf of the pytree: its shape and its dtype."""

    shape: tuple[int, ...]
    dtype: str


@partial(jax.tree_util.register_dataclass, data_fields=["step"], meta_fields=["layout"])
@dataclass(frozen=True)
class NoiseState:
    """The state of ``correlated_noise``.

    Attributes:
        step: the number of the next step, int32; num_steps when the plan is used up.
        layout: the shapes and dtypes of the leaves, which must not change.
    """

    step: Array
    layout: tuple[_Leaf, ...]


def correlated_noise(
    plan: Plan | Mechanism,
    key: Key,
    *,
    clip_norm: float | None = None,
    scale: float | None = None,
    divisor: float | None = None,
    stream: int = 0,
    rounds: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Add the noise (C⁻¹z)[step] of a plan to sums of clipped gradients, and divide them.

    What comes out at step i is (sum + scale·Σ_t c_t·z[i - t])/divisor, where z is the
    ``NoiseStream`` of the key over the flat vector of all leaves, in the order of
    ``jax.tree.leaves``. Past z are regenerated: the state is the step alone.

    Guarantees: the words are those of every other backend, bit for bit; the normals differ from
    exact ones by less than 1e-6. The noise does not depend on how leaves are sharded, and each
    device makes its own part. From step num_steps on, every leaf is NaN: noise is never used twice.
    What a transformation cannot see is whether two programs, or two branches of one program, use
    the same key and step on different gradients; ``PrivateRun`` keeps the ledger that can.

    Args:
        plan: a plan; or a mechanism, with ``scale``.
        key: the secret.
        clip_norm: for a plan, the largest norm of one example's gradient; the scale is the plan's
            noise multiplier times this, and the divisor is the plan's.
        scale: for a mechanism, the standard deviation of z.
        divisor: what the noisy sum is divided by; 1 by default for a mechanism.
        stream: an id below 2^32, to use one key for several pytrees.
        rounds: of ChaCha: the plan's, or 20.

    Returns:
        a transformation whose ``update`` takes ``secret=secret_words(key)`` besides. Under ``jit``,
        pass it as an argument of the compiled function: without it the subkey becomes a constant
        of the program, and is stored wherever the program is.

    Raises:
        ValueError: the mechanism needs stored noise, or an argument is wrong.
    """
    mechanism = plan.mechanism if isinstance(plan, Plan) else plan
    if not isinstance(mechanism, Mechanism):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"plan must be a Plan or a Mechanism, got {type(plan).__name__}; use corrnoise.plan"
        )
    if isinstance(plan, Plan) and mechanism.in_float32() != mechanism:
        raise ValueError(
            f"plan must be priced for the coefficients that run, rounded to float32, got "
            f"{mechanism!r} before rounding, whose sensitivity may be smaller; use "
            "corrnoise.plan, or calibrate mechanism.in_float32()"
        )
    size = _scale(plan, clip_norm, scale)
    if rounds is None:
        rounds = plan.rounds if isinstance(plan, Plan) else 20
    source = NoiseStream(key, stream, rounds)
    by = divisor
    if by is None:
        by = plan.divisor if isinstance(plan, Plan) else 1.0
    if not (math.isfinite(by) and by > 0):
        raise ValueError(f"divisor must be finite and above 0, got {divisor}")
    weights = _weights(mechanism, size)
    own = _words(source)
    n = mechanism.num_steps

    def init(params: Tree) -> Any:
        _check_group(source, params)
        return NoiseState(jnp.zeros((), jnp.int32), layout_of(params))

    def update(
        updates: Tree, state: Any, params: Tree = None, *, secret: Array = None, **_: Any
    ) -> tuple[Tree, Any]:
        del params
        leaves, structure = jax.tree.flatten(updates)
        layout = layout_of(updates)
        if not _fits(layout, state.layout):
            raise ValueError(
                f"updates must have the shapes and dtypes that init saw, got {layout} in place of "
                f"{state.layout}; noise belongs to places of the flat vector: call init anew with "
                "a new key"
            )
        _check_place()
        words = _given(secret, own, leaves, state.step)
        inside = (state.step >= 0) & (state.step < n)
        row = weights(jnp.clip(state.step, 0, n - 1))
        row = jnp.where(inside, row, jnp.nan)
        step = jnp.clip(state.step, 0, n - 1).astype(jnp.uint32)
        noisy, offset = list[Array](), 0
        for leaf, kept in zip(leaves, state.layout, strict=True):
            place = Place(offset, float(by), source.stream, source.rounds)
            noisy.append(add_noise(leaf, words, row, step, place).astype(kept.dtype))
            offset += leaf.size
        after = jnp.where(inside, state.step + 1, n).astype(jnp.int32)
        return jax.tree.unflatten(structure, noisy), NoiseState(after, state.layout)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_group(source: NoiseStream, params: Tree) -> None:
    """Raise where other leaves of a masked pytree already have the noise of this key and stream."""

    def masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    if not any(map(masked, jax.tree.leaves(params, is_leaf=masked))):
        return
    own = tuple(
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)
    )
    if _GROUPS.setdefault((source.key.fingerprint, source.stream), own) != own:
        raise ValueError(
            f"key and stream must serve one group of leaves, got stream={source.stream} for two "
            "groups of multi_transform or masked: both would get the same noise, and the "
            "difference of their gradients none; put correlated_noise before multi_transform in "
            "a chain, or give each group a stream of its own"
        )


def _check_place() -> None:
    """Raise inside of shard_map and pmap, where each device has gradients of its own."""
    manual = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if manual:
        raise ValueError(
            f"update must be called outside of shard_map and pmap, got manual axes {manual}: every "
            "device would add the same noise to its own gradients; sum them over the devices, and "
            "call update on sharded arrays under jit"
        )


def secret_words(key: Key) -> Array:
    """The 8 words of the subkey of the noise, to be passed to ``update`` as ``secret``.

    They are as secret as the key: keep them out of checkpoints and logs.
    """
    return jnp.asarray(_words(NoiseStream(key)))


def _words(source: NoiseStream) -> Any:
    return np.frombuffer(source.secret, "<u4").astype(np.uint32)


def _given(secret: Array, own: Any, leaves: list[Array], step: Array) -> Array:
    """The words to use, or raise where the compiled program would be stored with them."""
    if secret is not None:
        if jnp.shape(secret) != (8,) or jnp.result_type(secret) != jnp.uint32:
            raise ValueError("secret must be secret_words(key): 8 words of uint32")
        return jnp.asarray(secret)
    traced = any(isinstance(value, Tracer) for value in (*leaves, step))
    if traced and jax.config.jax_compilation_cache_dir is not None:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            "secret must be given where compiled programs are cached on a disk "
            "(jax_compilation_cache_dir is set): the key would be stored in the cache; pass "
            "secret=secret_words(key) to update, as an argument of the compiled function"
        )
    return jnp.asarray(own)


def _scale(plan: Plan | Mechanism, clip_norm: float | None, scale: float | None) -> float:
    if isinstance(plan, Plan):
        if clip_norm is None or scale is not None:
            raise ValueError(
                "a plan must come with clip_norm and without scale: the scale is its noise "
                "multiplier times clip_norm"
            )
        norm = checks.number("clip_norm", clip_norm, 0.0)
        if norm <= 0:
            raise ValueError(f"clip_norm must be above 0, got {clip_norm}")
        return check_scale(plan.noise_multiplier * norm)
    if scale is None or clip_norm is not None:
        raise ValueError(
            "a mechanism must come with scale, the noise multiplier times the clip norm, and "
            "without clip_norm; or pass a plan"
        )
    return check_scale(scale)


def _weights(mechanism: Mechanism, scale: float) -> Any:
    """From a step to scale times the weights of z[step], z[step - 1] and so on."""
    spec = Filter.of(mechanism)
    if spec.num_terms is None or not mechanism.toeplitz:
        raise ValueError(
            "plan must have a banded C⁻¹ with the same coefficients at every step, so that past "
            f"noise can be regenerated, got {mechanism!r}, which keeps {spec.num_past} model-sized "
            "vectors; use bisr, band_inv_mf or dp_sgd, or corrnoise.noise.CorrelatedNoise"
        )
    row = jnp.asarray(spec.weights(spec.num_steps - 1)[::-1] * np.float32(scale))
    lags = np.arange(spec.num_terms)
    return lambda step: jnp.where(lags <= step, row, 0.0)


def _fits(given: tuple[_Leaf, ...], kept: tuple[_Leaf, ...]) -> bool:
    """Whether updates are those of a layout; sums in float32 are, for parameters in bfloat16."""
    return len(given) == len(kept) and all(
        new.shape == old.shape and new.dtype in (old.dtype, "float32")
        for new, old in zip(given, kept, strict=True)
    )


def layout_of(tree: Tree) -> tuple[_Leaf, ...]:
    """The leaves of a pytree, or raise where one cannot get noise."""
    found: list[_Leaf] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path) or "the leaf"
        kind = str(getattr(leaf, "dtype", type(leaf).__name__))
        if kind not in _KINDS:
            raise ValueError(
                f"leaves must be float32 or bfloat16, got {kind} in {name}; noise is made in "
                "float32: convert it, or leave it out of the pytree"
            )
        if leaf.size > _LARGEST_LEAF:
            raise ValueError(
                f"leaves must have less than 2^31 elements, got {leaf.size} in {name}; split it"
            )
        found.append(_Leaf(tuple(leaf.shape), kind))
    total = sum(math.prod(leaf.shape) for leaf in found)
    if not 0 < total <= _LARGEST:
        raise ValueError(
            f"the pytree must have between 1 and 2^36 elements, got {total}; use several "
            "transformations with different values of stream for more"
        )
    return tuple(found)
