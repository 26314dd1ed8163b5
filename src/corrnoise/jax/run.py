"""A private run in one process: key, ledger, batches and statement around the transformation."""

from __future__ import annotations

import hashlib
import math
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.core import Tracer

from corrnoise import _checks as checks
from corrnoise.jax.clipping import clipped_sums
from corrnoise.jax.transformation import (
    NoiseState,
    correlated_noise,
    layout_of,
    secret_words,
)
from corrnoise.noise import Key
from corrnoise.planning import Plan
from corrnoise.records import Ledger, Statement
from corrnoise.records.header import header
from corrnoise.records.keys import Use, keep_key, keyed, open_key
from corrnoise.records.spent import Spent

Array = Any
Tree = Any

# Kinds of leaves that a digest of the data may have besides arrays.
_SCALARS = ("str", "bytes", "bool", "int", "float")
# What rounding in float32 may add to the norm of a sum, relatively.
_ROUNDING = 1e-3


class PrivateRun:
    """What a transformation cannot do by itself: no step is released twice with other gradients.

    ``release`` is the private step: it refuses what the plan does not cover, writes a keyed digest
    of the sums to the ledger, forces it to the disk, and adds the noise. A run that resumes from a
    checkpoint must repeat released steps bit for bit, or stop.

    It reads the sums on the host once a step, so it is called outside of ``jit``; losses, gradients
    and clipping before it, and the optimizer after it, may be compiled. One process drives all
    devices; for several processes use ``correlated_noise`` and protect the key yourself.

    Args:
        plan: what was planned; it is computed again unless it was made by this process.
        params: the pytree that is trained, or its shapes: the leaves are the flat vector.
        clip_norm: the largest norm of one example's gradient.
        data: the dataset: a name, or a pytree of arrays with a row for each example, which is
            digested.
        key: a ``Key``, or a path where it is kept (mode 0600, made if it is not there; apart from
            checkpoints). From the operating system, and forgotten with the process, by default.
        ledger: a path for the ledger of released steps. With a path for the key, it makes a run
            that can resume.
        settings: plain values that must not change until the end of the run.

    Raises:
        ValueError: the plan, the key or the ledger do not fit, with the reason and the remedy.
    """

    def __init__(
        self,
        plan: Plan,
        params: Tree,
        *,
        clip_norm: float,
        data: Any,
        key: Key | str | os.PathLike[str] | None = None,
        ledger: str | os.PathLike[str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if jax.process_count() > 1:
            raise ValueError(
                f"a PrivateRun must be alone, got {jax.process_count()} processes of JAX; use "
                "correlated_noise, and see that the key serves no other run"
            )
        if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"plan must be a Plan, got {type(plan).__name__}; use corrnoise.plan")
        if plan.noise_multiplier <= 0:
            raise ValueError(
                "plan must have noise, got noise_multiplier=0: such a run is not private"
            )
        self.plan, self.clip_norm = plan.verified(), float(clip_norm)
        place = None if ledger is None else Path(ledger)
        self.key, run_id = open_key(key, place)
        self.noise = correlated_noise(plan, self.key, clip_norm=clip_norm)
        self.batches = plan.batches(self.key)
        self._layout = layout = self.init(params).layout
        self.num_parameters = sum(math.prod(leaf.shape) for leaf in layout)
        _check_data(data, plan.num_examples)
        self._update = jax.jit(partial(_update, self.noise))
        self._secret = secret_words(self.key)
        self._process, self._spent = os.getpid(), Spent(plan)
        self._one_at_a_time = threading.Lock()
        self._ledger = Ledger(
            header(
                plan,
                run_id=run_id or uuid.uuid4().hex,
                key_fingerprint=self.key.fingerprint,
                max_grad_norm=self.clip_norm,
                data=data if isinstance(data, str) else self._digest(b"data", data),
                parameters=keyed(self.key, b"parameters", repr(layout).encode()),
                settings=settings or {},
                noise=f"chacha{plan.rounds}",
            ),
            place,
            self.key.subkey("ledger"),
        )
        self._use: Use | None = keep_key(key, self.key, self._ledger)

    @property
    def steps_released(self) -> int:
        """How many steps were ever released; those of an earlier process count."""
        return self._ledger.num_released

    def init(self, params: Tree) -> NoiseState:
        """The state before the first step."""
        return cast(NoiseState, self.noise.init(params))

    def clipped_sums(
        self, loss: Callable[..., Array], params: Tree, *batch: Tree, mask: Array = None
    ) -> Tree:
        """``corrnoise.jax.clipped_sums`` with the clip norm of the run, which no loop can mistake.

        Args:
            loss: of the parameters and one example.
            params: the pytree to differentiate for.
            batch: the rows of ``batches.indices(step)``, in arrays or pytrees of them.
            mask: 1 for each example that counts and 0 for padding.
        """
        return clipped_sums(loss, params, *batch, clip_norm=self.clip_norm, mask=mask)

    def release(self, sums: Tree, state: NoiseState) -> tuple[Tree, NoiseState]:
        """Add the noise of the step to sums of clipped gradients, and divide them.

        Args:
            sums: of the clipped gradients of ``batches.indices(state.step)``, one for each example,
                in float32; what comes out has the dtypes of the parameters.
            state: of the step.

        Raises:
            ValueError: something is refused; nothing was released.
        """
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((sums, state))):
            raise ValueError(
                "release must be called outside of jit, scan, vmap and grad: it reads the sums on "
                "the host and writes to the ledger; compile what comes before it and after it"
            )
        with self._one_at_a_time:
            return self._release(sums, state)

    def _release(self, sums: Tree, state: NoiseState) -> tuple[Tree, NoiseState]:
        step = int(state.step)
        n = self.plan.num_steps
        if os.getpid() != self._process:
            raise ValueError(
                "a run must stay in the process that began it, got a step in a fork of it; two "
                "processes would release different gradients with the same noise"
            )
        if not 0 <= step < n:
            raise ValueError(f"step must be in [0, {n}), as planned, got {step}; make a new plan")
        self._check_layout(sums, state)
        self._check(sums, step)
        if self._use is not None:
            self._use.claim()
        self._ledger.record(step, self._digest(b"gradient" + str(step).encode(), sums))
        if self._use is not None:
            self._use.mark()
            self._use = None
        # JAX computes later, on a CPU from memory that may be NumPy's: what is written there after
        # this call must not get into the step.
        return jax.block_until_ready(self._update(sums, state, self._secret))

    def epsilon(self, steps_taken: int | None = None, delta: float | None = None) -> float:
        """ε of the steps released so far, or of the first ``steps_taken``; exact or a bound."""
        whole = self.plan.calibration
        taken = self.steps_released if steps_taken is None else steps_taken
        taken = checks.integer("steps_taken", taken, 0, self.plan.num_steps)
        return self._spent.epsilon(taken, whole.delta if delta is None else delta)

    def statement(self) -> Statement:
        """The privacy statement of what was released so far."""
        taken, epsilon = self.steps_released, self.epsilon()
        found = Statement.of(
            self.plan,
            clip_norm=self.clip_norm,
            steps_taken=taken,
            epsilon=epsilon,
            key_fingerprint=self.key.fingerprint,
            run_id=self._ledger.header["run_id"],
            num_parameters=self.num_parameters,
        )
        # A part of a certified run is priced by a bound that holds with certainty.
        part = self.plan.calibration.kind == "certified" and epsilon != self.plan.epsilon
        return found.as_bound() if part else found

    def close(self) -> None:
        """Close the ledger, so that another process can continue the run."""
        self._ledger.close()

    def _check(self, sums: Tree, step: int) -> None:
        """Raise unless the sums are finite and no longer than clipped gradients can make them."""
        leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(sums)]
        norm = math.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in leaves))
        count = len(self.batches.indices(step))
        if not norm <= count * self.clip_norm * (1.0 + _ROUNDING):  # or NaN
            raise ValueError(
                f"the sum of {count} clipped gradients must be finite with a norm of at most "
                f"{count * self.clip_norm:g}, got {norm:g} at step {step}; nothing was released: "
                "clip the gradient of each example of batches.indices(step), and add them up"
            )

    def _check_layout(self, sums: Tree, state: NoiseState) -> None:
        """Raise unless the sums are those of the parameters, not yet rounded."""
        found = layout_of(sums)
        shapes, own = ([leaf.shape for leaf in each] for each in (found, self._layout))
        if shapes != own or state.layout != self._layout:
            raise ValueError(
                "sums and state must be of the parameters that the run began with, got sums of "
                f"shapes {shapes} for parameters of {own}; nothing was released: pass "
                "run.init(params), and the sums of their gradients"
            )
        if any(leaf.dtype != "float32" for leaf in found):
            raise ValueError(
                "sums must be float32, as clipped_sums gives them, also for parameters in "
                "bfloat16: where a sum is rounded before the noise, one example may change it by "
                "more than clip_norm; nothing was released: pass them without a conversion"
            )

    def _digest(self, what: bytes, tree: Tree) -> str:
        """64 keyed bits that tell arrays from others, and tell nothing without the key."""
        text = hashlib.sha256()
        for leaf in jax.tree.leaves(tree):
            array = np.asarray(leaf)
            text.update(repr((array.shape, str(array.dtype))).encode())
            text.update(np.ascontiguousarray(array).tobytes())
        return keyed(self.key, what, text.digest())


def _check_data(data: Any, num_examples: int) -> None:
    """Raise unless the data are a name or arrays, with a row for each example of the plan."""
    leaves = jax.tree.leaves(data)
    for leaf in leaves or [data]:
        if str(getattr(leaf, "dtype", type(leaf).__name__)) not in _SCALARS:
            shape = getattr(leaf, "shape", None)
            if shape is None or str(leaf.dtype) == "object":
                raise ValueError(
                    "data must be a name or a pytree of arrays, which can be digested, got "
                    f"{type(leaf).__name__}; pass a name for the dataset"
                )
            if shape and shape[0] != num_examples:
                raise ValueError(
                    f"data must have the plan's {num_examples} examples, got an array of "
                    f"{shape[0]} rows; where an index is beyond an array, JAX takes the last row "
                    "in silence, and that example is in a batch many times: plan for this "
                    "dataset, or pass a name for it"
                )


def _update(noise: Any, sums: Tree, state: NoiseState, secret: Array) -> tuple[Tree, NoiseState]:
    return noise.update(sums, state, secret=secret)
