"""Correlated noise for any training loop: (C⁻¹z)[step] is added to the gradients of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from corrnoise import _checks as checks
from corrnoise._threads import processors
from corrnoise.mechanisms import Mechanism
from corrnoise.noise import sealing
from corrnoise.noise import state as _state
from corrnoise.noise.backends.cpu import CpuBackend, Layout, as_array
from corrnoise.noise.backends.targets import Targets, check_scale, check_targets
from corrnoise.noise.filtering import scheme as _scheme
from corrnoise.noise.filtering.filters import Filter
from corrnoise.noise.generator.key import Key
from corrnoise.noise.generator.normals import Normals
from corrnoise.noise.generator.stream import LARGEST_WORD, NoiseStream, check_slice

_INTERRUPTED = (
    "step must follow a completed one, but the last was interrupted and the state is damaged; "
    "load a saved state or call seek"
)


class CorrelatedNoise:
    r"""The noise (C⁻¹z)[step] of a mechanism, added to gradients in place.

    Row i is Σ_t c_t·z[i - t] for the coefficients c of C⁻¹, where z is the ``NoiseStream`` of the
    key. ``scheme`` says what is stored between steps: for a banded C⁻¹ nothing, unless ``memory``
    allows it; for any other C⁻¹ the state of its recursion.

    Guarantees: mechanism, key, stream and number of rounds determine the rows, for every scheme,
    every sharding and every restart. With the same scheme on the same machine they are equal bit
    for bit; otherwise they differ from exact arithmetic by a few float32 units. All arguments are
    validated before anything is changed.

    Cost of a step, for each parameter: p draws for a banded C⁻¹ without state, fewer with state
    (``scheme.draws_per_step``), and one draw for a recursion.

    Args:
        mechanism: any of ``corrnoise.mechanisms``.
        key: the secret; by default a fresh one from the operating system. Save it (``key.save``) if
            the run may have to resume.
        stream: an id below 2^32, to use one key for several parameter vectors.
        memory: how many model-sized float32 vectors may be stored to save time; the fastest scheme
            that fits is taken. A recursion needs its own state whatever ``memory`` says.
        rounds: the number of ChaCha rounds: 20, or 12 or 8 as in ``NoiseStream``.
        threads: the number of threads for gradients in main memory; all processors by default.

    >>> import corrnoise as cn
    >>> mechanism = cn.mechanisms.bisr(cn.workloads.prefix_sum(100), num_bands=4)
    >>> noise = CorrelatedNoise(mechanism, Key.from_bytes(bytes(range(32))))
    >>> noise.scheme.kind, noise.scheme.draws_per_step, noise.scheme.bytes_per_parameter
    ('regenerate', 4.0, 0)
    >>> grads = [np.zeros((2, 3), np.float32), np.zeros(5, np.float32)]
    >>> noise.add_(grads, step=7, scale=1.0)
    >>> bool((grads[1] == noise.row(7, 6, 11)).all())
    True
    """

    def __init__(
        self,
        mechanism: Mechanism,
        key: Key | None = None,
        stream: int = 0,
        memory: float = 0,
        rounds: int = 20,
        *,
        threads: int | None = None,
    ) -> None:
        if not isinstance(mechanism, Mechanism):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"mechanism must be a Mechanism, got {type(mechanism).__name__}; "
                "use one of corrnoise.mechanisms"
            )
        checks.integer("num_steps", mechanism.num_steps, 1, LARGEST_WORD, "steps are 32-bit")
        self.stream = NoiseStream(Key.generate() if key is None else key, stream, rounds)
        self._filter = Filter.of(mechanism)
        self.scheme = _scheme.choose(self._filter, memory, self.stream.rounds)
        threads = processors() if threads is None else threads
        self._threads = checks.integer("threads", threads, 1)
        self._backends: dict[str, Any] = {}
        self._forget(0)

    @property
    def num_steps(self) -> int:
        """The number of steps that the mechanism is built for."""
        return self._filter.num_steps

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that is run, with its coefficients rounded to float32.

        Calibrate the noise for this one: its sensitivity is the sensitivity of the run.
        """
        return self._filter.mechanism.in_float32()

    @property
    def key(self) -> Key:
        """The secret key, to be saved separately from checkpoints."""
        return self.stream.key

    def add_(self, grads: Any, step: int, scale: float, offsets: list[int] | None = None) -> None:
        """Add scale·(C⁻¹z)[step] in place to a list of tensors or arrays.

        Args:
            grads: torch tensors on one CPU or CUDA device (float32, bfloat16, float16), or NumPy
                arrays (float32, float64); contiguous. Arithmetic is float32, rounded once.
            step: in [0, num_steps). A recursion takes the steps in order; to start at another
                step, load a state or call ``seek``.
            scale: the standard deviation of z: noise multiplier times clip norm.
            offsets: where each tensor begins in the flat parameter vector; by default each begins
                where the one before it ends. A rank that holds a shard passes the shard's offsets
                and gets its slice of the noise.
        """
        step = self._check_step(step)
        scale = check_scale(scale)
        targets = check_targets(grads, offsets)
        if self.scheme.kind == "regenerate":
            weights = self._filter.weights(step)
            self._backend(targets.device).add_weighted(
                targets.items, targets.layout, step, weights, scale
            )
            return
        if self.scheme.kind == "recursion":
            self._check_order(step)
        self._settle(targets)
        if self.scheme.kind == "lookahead":
            self._add_lookahead(targets, step, scale)
        elif self.scheme.kind == "ring":
            self._add_ring(targets, step, scale)
        else:
            self._add_recursion(targets, step, scale)

    def row(self, step: int, start: int, stop: int) -> Normals:
        """The slice (C⁻¹z)[step, start:stop], by the NumPy reference and without stored state.

        It costs p draws for a banded C⁻¹ and step + 1 draws for any other.
        """
        step = self._check_step(step)
        start, stop = check_slice(start, stop)
        return CpuBackend(self.stream, 1).row(step, self._filter.weights(step), start, stop)

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        """All n rows of the slice at once, shape (n, stop - start), in float64 by FFT.

        It is for research on few parameters: it takes 8·n·(stop - start) bytes, and O(n log n) time
        for each index.
        """
        start, stop = check_slice(start, stop)
        z = np.stack(
            [self.stream.normals(i, start, stop, np.float64) for i in range(self.num_steps)]
        )
        return self._filter.mechanism.correlate(z)

    def seek(self, step: int) -> None:
        """Make ``step`` the next step of a recursion, without a saved state.

        The next ``add_`` replays the steps before it, at ``step`` draws for each index. The other
        schemes need no call, as they take any step at any time. For each index a jump costs p draws
        with "regenerate", s draws more than other steps with a ring of s vectors, and at most
        p + m - 1 draws with lookahead.
        """
        self._forget(self._check_step(step))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides the key: plain values, and the state of a recursion.

        It has the fingerprint of the key, never the key. The state of a recursion contains past
        noise, so it is encrypted under the key (``noise.sealing``): without the key it reveals
        nothing. ``state`` is a torch tensor for torch gradients and otherwise an array; it is
        ``None`` if there is no state.
        """
        if self.scheme.kind != "recursion":
            return {**self._identity(), "next_step": None, "layout": [], "state": None}
        if self._ready is None:
            raise ValueError(_INTERRUPTED)
        header = {
            **self._identity(),
            "next_step": self._ready,
            "layout": [list(place) for place in self._layout or ()],
        }
        if self._replay or self._vectors is None:
            return {**header, "state": None}
        sealed = sealing.seal(as_array(self._vectors), self.key.subkey("state"), header)
        if self._device != "numpy":
            from corrnoise.noise.backends import torch_targets

            return {**header, "state": torch_targets.byte_tensor(sealed)}
        return {**header, "state": sealed}

    def load_state_dict(self, data: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken.

        Raises:
            ValueError: the state belongs to another key, stream, mechanism or number of rounds.
        """
        _state.check_identity(data, self._identity())
        if self.scheme.kind != "recursion":
            return
        found = _state.restore(data, self.scheme, self.num_steps, self.key)
        self._forget(found.step)
        if found.vectors is not None:
            self._layout, self._vectors, self._replay = found.layout, found.vectors, False
            self._device = "numpy" if isinstance(data["state"], np.ndarray) else "tensor"

    def __repr__(self) -> str:
        return (
            f"CorrelatedNoise({self._filter.mechanism!r}, key={self.key.fingerprint}, "
            f"stream={self.stream.stream}, rounds={self.stream.rounds}, {self.scheme.kind})"
        )

    # The methods below change the state; all arguments have been validated.

    def _add_lookahead(self, targets: Targets, step: int, scale: float) -> None:
        m = self.scheme.lookahead
        first, use = step - step % m, step % m
        backend = self._backend(targets.device)
        if use and self._ready == first:  # rows first + 1, … are stored
            backend.add_stored(targets.items, targets.layout, scale, self._vectors[use - 1])
            return
        count = min(m, self.num_steps - first)
        weights = [self._filter.weights(first + r) for r in range(count)]
        self._ready = None
        backend.add_lookahead(
            targets.items, targets.layout, first, weights, use, scale, self._vectors
        )
        self._ready = first

    def _add_ring(self, targets: Targets, step: int, scale: float) -> None:
        s, backend = self.scheme.num_vectors, self._backend(targets.device)
        if self._ready != step:
            self._ready = None
            for past in range(step - s, step):
                if past < 0:
                    self._vectors[past % s] = 0.0
                else:
                    backend.store_normals(targets.layout, past, self._vectors[past % s])
        older = self._filter.weights(step)[: -s - 1]
        self._filtered(targets, step, self._filter.window(s), scale, older)

    def _add_recursion(self, targets: Targets, step: int, scale: float) -> None:
        backend = self._backend(targets.device)
        if self._replay:
            self._ready = None
            for past in range(step):
                backend.add_filtered(
                    None, targets.layout, past, self._filter.sections(past), 0.0, self._vectors
                )
            self._replay = False
        self._filtered(targets, step, self._filter.sections(step), scale)

    def _filtered(
        self, targets: Targets, step: int, sections: Any, scale: float, older: Normals | None = None
    ) -> None:
        self._ready = None
        self._backend(targets.device).add_filtered(
            targets.items, targets.layout, step, sections, scale, self._vectors, older
        )
        self._ready = step + 1

    def _settle(self, targets: Targets) -> None:
        """Bind the state to the gradients' layout and device; raise if the layout has changed."""
        if self._layout is not None and self._layout != targets.layout:
            raise ValueError(
                f"grads must keep the sizes and offsets that the state was made for "
                f"({len(self._layout)} tensors, {sum(s for _, s in self._layout)} elements), got "
                f"{len(targets.layout)} and {targets.size}; use one CorrelatedNoise for each list"
            )
        backend = self._backend(targets.device)
        if self._vectors is None:
            self._vectors = backend.zeros(self.scheme.num_vectors, targets.size)
        elif self._device != targets.device:
            self._vectors = backend.adopt(self._vectors)
        self._layout, self._device = targets.layout, targets.device

    def _forget(self, step: int) -> None:
        recursion = self.scheme.kind == "recursion"
        # The step that the state is for (lookahead: the first of the rows computed at once).
        self._ready: int | None = step if recursion else None
        self._replay = recursion and step > 0 and self.scheme.num_vectors > 0
        self._layout: Layout | None = None
        self._device: str | None = None
        self._vectors: Any = None

    def _backend(self, device: str) -> Any:
        if device not in self._backends:
            if device.startswith("cuda"):
                from corrnoise.noise.backends.triton_backend import TritonBackend

                self._backends[device] = TritonBackend(self.stream, device)
            else:
                self._backends[device] = CpuBackend(self.stream, self._threads)
        return self._backends[device]

    def _identity(self) -> dict[str, Any]:
        return _state.identity(self.stream, self._filter)

    def _check_step(self, step: object) -> int:
        n = self.num_steps
        return checks.integer("step", step, 0, n - 1, f"the mechanism is planned for {n} steps")

    def _check_order(self, step: int) -> None:
        if self._ready is None:
            raise ValueError(_INTERRUPTED)
        if step != self._ready:
            raise ValueError(
                f"step must be {self._ready}, the next one of a recursion, got {step}; load the "
                f"state of that step, or call seek({step}), which replays {step} steps"
            )
