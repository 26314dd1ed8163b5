"""The protocol of a sampling: how batches are drawn, when its analysis is valid, what ε it gives.

A sampling is one object. It says for which mechanisms and participations it is valid, computes the
privacy of a run ("prices" it), draws its batches from a key, and describes itself in words and
JSON. No other code compares its name. ``register`` adds a new one.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from corrnoise import _checks as checks
from corrnoise._threads import one_blas_thread
from corrnoise.accounting import gaussian, roots
from corrnoise.accounting.draws import Draws
from corrnoise.mechanisms import Mechanism
from corrnoise.mechanisms.registry import Amplification
from corrnoise.noise import Key
from corrnoise.participation import Participation
from corrnoise.samplings.batches import Batches
from corrnoise.samplings.calibration import Calibration
from corrnoise.workloads import Workload

Array = npt.NDArray[np.float64]

# Results are rounded toward privacy by this relative amount, which exceeds the arithmetic error.
_ROUNDING = 1e-12
# The relative width of the bracket that a search for noise or ε ends with.
_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Sampling(ABC):
    """One way to draw the batches of a run, with its privacy analysis.

    A subclass must define the class attributes, ``objection``, ``delta`` and ``batches``; noise and
    ε are computed from ``delta``. Its parameters, if any, are fields of a frozen dataclass with
    defaults, and are restored from JSON. ``docs/extending.md`` adds one.

    Every method that returns a noise, an ε or a δ returns an exact value or an upper bound, proven
    or certified; only ``estimate`` guarantees nothing.
    """

    # The name, as users write it.
    name: ClassVar[str]
    # How batches are drawn, in one sentence for a privacy statement.
    sentence: ClassVar[str]
    # The accountant, in a few words for a privacy statement.
    accountant: ClassVar[str]
    # Whether the batches are random, and ε holds only if they stay secret.
    secret: ClassVar[bool]
    # What its analysis favours in a mechanism; it decides which candidates a planner tries.
    amplification: ClassVar[Amplification] = "none"
    # Whether ε is certified by random draws, which takes seconds.
    certified: ClassVar[bool] = False
    # Whether ``calibrate`` is slow: a planner ranks by ``estimate`` and calibrates the best few.
    slow: ClassVar[bool] = False
    # Whether a run may be shorter than an epoch.
    partial_epoch: ClassVar[bool] = False
    # Whether ε follows from the sensitivity of C, which a statement then shows.
    by_sensitivity: ClassVar[bool] = False
    # A sentence for a report on what ``least_error`` assumes; "" if it gives no bound.
    about_least_error: ClassVar[str] = ""

    # Validity.

    @abstractmethod
    def objection(self, mechanism: Mechanism, participation: Participation) -> str:
        """Why this sampling has no valid analysis for a mechanism; "" if it has one."""

    def takes_part(self, mechanism: Mechanism, participation: Participation) -> str:
        """How often one example takes part, in words that follow "each example" in a statement.

        The words must be true for the batches of this sampling. ``participation.words`` are true
        only for batches that repeat every b steps.
        """
        return "as its batches are drawn"

    # Privacy cost.

    @abstractmethod
    def delta(
        self,
        mechanism: Mechanism,
        participation: Participation,
        noise_multiplier: float,
        epsilon: float,
        num_steps: int,
    ) -> float:
        """A proven upper bound of δ(ε) of the first ``num_steps`` steps, with no random draws."""

    def kind(self, mechanism: Mechanism, participation: Participation) -> Literal["exact", "bound"]:
        """Whether ``delta`` is exact or an upper bound."""
        return "bound"

    def noise(
        self, mechanism: Mechanism, participation: Participation, epsilon: float, delta: float
    ) -> float:
        """The least noise multiplier with which a run is (ε, δ)-DP, or slightly more."""

        def price(noise: float) -> float:
            return self.delta(mechanism, participation, noise, epsilon, participation.num_steps)

        sens = mechanism.sensitivity(participation).value
        high = gaussian.noise_multiplier(epsilon, delta, sens)
        near = self._near(mechanism, participation, epsilon, delta) or high / 2.0
        while True:
            found = roots.least(price, delta, (1e-3 * high, high), _TOLERANCE, near)
            if found < high or price(high) <= delta:
                return found
            high, near = 2.0 * high, high

    def _near(
        self, mechanism: Mechanism, participation: Participation, epsilon: float, delta: float
    ) -> float | None:
        """A guess of the noise at which a search begins, or ``None``."""
        return None

    def epsilon(
        self,
        mechanism: Mechanism,
        participation: Participation,
        noise_multiplier: float,
        delta: float,
        num_steps: int,
    ) -> float:
        """An ε with which the first steps are (ε, δ)-DP: the least one, or a little more."""

        def price(epsilon: float) -> float:
            return self.delta(mechanism, participation, noise_multiplier, epsilon, num_steps)

        if price(0.0) <= delta:
            return 0.0
        high = 1.0
        while price(high) > delta:
            high *= 2.0
        return roots.least(price, delta, (1e-6 * high, high), _TOLERANCE, high / 2.0)

    @one_blas_thread()
    def without_draws(
        self,
        mechanism: Mechanism,
        participation: Participation,
        noise_multiplier: float,
        delta: float,
    ) -> Calibration:
        """The ε of a run at this δ, exact or a proven bound, with no random draws."""
        n, kind = participation.num_steps, self.kind(mechanism, participation)
        epsilon = self.epsilon(mechanism, participation, noise_multiplier, delta, n)
        return Calibration(mechanism, participation, self, noise_multiplier, epsilon, delta, kind)

    def curve(
        self, mechanism: Mechanism, participation: Participation, noise_multiplier: float
    ) -> Callable[[int, float], float]:
        """ε as a function of the steps taken and δ, with no random draws, for one run.

        A sampling whose ε takes long to compute may use the result of one call in the next.
        """

        def epsilon(num_steps: int, delta: float) -> float:
            return self.epsilon(mechanism, participation, noise_multiplier, delta, num_steps)

        return epsilon

    def calibrate(
        self,
        mechanism: Mechanism,
        participation: Participation,
        epsilon: float,
        delta: float,
        draws: Draws,
    ) -> Calibration:
        """The least noise with which a run is (ε, δ)-DP."""
        noise = self.noise(mechanism, participation, epsilon, delta)
        kind = self.kind(mechanism, participation)
        return Calibration(mechanism, participation, self, noise, epsilon, delta, kind)

    def account(
        self,
        mechanism: Mechanism,
        participation: Participation,
        noise_multiplier: float,
        *,
        epsilon: float | None,
        delta: float | None,
        draws: Draws,
    ) -> Calibration:
        """The ε at a given δ, or the δ at a given ε, with this noise; one of them is ``None``."""
        n, kind = participation.num_steps, self.kind(mechanism, participation)
        if epsilon is None:
            assert delta is not None
            epsilon = self.epsilon(mechanism, participation, noise_multiplier, delta, n)
        else:
            found = self.delta(mechanism, participation, noise_multiplier, epsilon, n)
            kind = kind if found > sys.float_info.min else "bound"
            delta = delta_rounded_up(found)
        return Calibration(mechanism, participation, self, noise_multiplier, epsilon, delta, kind)

    def spent(self, whole: Calibration, steps_taken: int, draws: Draws) -> float:
        """The ε of the first steps of a run at its δ, for 0 < ``steps_taken`` < n."""
        return self.epsilon(
            whole.mechanism, whole.participation, whole.noise_multiplier, whole.delta, steps_taken
        )

    def estimate(
        self,
        mechanism: Mechanism,
        participation: Participation,
        epsilon: float,
        delta: float,
        draws: Draws,
        effort: int = 1,
    ) -> float:
        """A quick estimate of the noise that ``calibrate`` finds, for ranking, with no guarantee.

        ``effort`` multiplies its time and makes it more accurate.
        """
        return self.noise(mechanism, participation, epsilon, delta)

    def least_error(
        self, workload: Workload, participation: Participation, epsilon: float, delta: float
    ) -> float | None:
        """An error per unit of clip norm that no factorization can beat; ``None`` if unknown."""
        return None

    def event(self, calibration: Calibration) -> Any:
        """The run as a ``dp_accounting`` event, to compose with other releases."""
        raise ValueError(
            f"sampling={self.name!r} has no dp_accounting event; compose its (ε, δ), or use the "
            "event of sampling='fixed' with the same noise, which is weaker but valid"
        )

    def log_ratio(
        self,
        mechanism: Mechanism,
        participation: Participation,
        precision: Array,
        outputs: Array,
        taken: npt.NDArray[np.bool_],
        means: Array | None = None,
    ) -> Array:
        """The log-likelihood ratio of what a run released, with one example against without it.

        An audit guesses by it whether the example was in. Consider a direction in which no other
        example has a gradient and this one has gradient 1. There a run releases x = π + noise with
        the example, and only noise without it. π is 1 at each step that takes the example and 0
        elsewhere; if the batches are secret, π is random.

        Args:
            mechanism: the mechanism of the run.
            participation: n, b, k.
            precision: the inverse of the covariance of the noise over the steps, n × n.
            outputs: x of m examples, n × m.
            taken: whether each step's batch has the example, n × m; read only if batches are
                public.
            means: the expected outputs to use instead of π, b × n, one row for each batch of the
                first epoch that may have the example. Not used unless batches are a fixed cycle.
        """
        raise ValueError(
            f"sampling={self.name!r} has no likelihood ratio, so that its runs cannot be audited; "
            "define Sampling.log_ratio"
        )

    # Batches.

    def rate(self, participation: Participation) -> Fraction:
        """The expected fraction of the dataset in a batch."""
        return Fraction(1, participation.min_sep)

    @abstractmethod
    def batches(
        self,
        num_examples: int,
        participation: Participation,
        mechanism: Mechanism,
        key: Key,
        *,
        shuffled: bool = False,
    ) -> Batches:
        """The batches of a run; all randomness comes from the key.

        Args:
            num_examples: the size of the dataset.
            participation: n, b, k.
            mechanism: the mechanism of the run.
            key: the secret that the draws come from.
            shuffled: whether the order of fixed batches is random; other samplings ignore it.
        """

    # Conversion to text and JSON.

    def to_json(self) -> Any:
        """The name; or an object with the name and the parameters, if there are any."""
        parameters = dataclasses.asdict(self)
        return {"name": self.name, **parameters} if parameters else self.name

    def __str__(self) -> str:
        return self.name


_KNOWN: dict[str, Sampling] = {}


def register(*samplings: Sampling) -> None:
    """Register samplings by name; a new sampling replaces an old one of the same name."""
    for sampling in samplings:
        _KNOWN[sampling.name] = sampling


def names() -> tuple[str, ...]:
    """The names of all samplings.

    >>> "balls-in-bins" in names()
    True
    """
    return tuple(_KNOWN)


def get(sampling: str | Mapping[str, Any] | Sampling) -> Sampling:
    """A sampling from its name or from the result of ``to_json``; a sampling is returned as is.

    >>> get("poisson").secret
    True
    """
    if isinstance(sampling, Sampling):
        return sampling
    parameters: dict[str, Any] = {}
    name: Any = sampling
    if isinstance(sampling, Mapping):
        parameters = dict(sampling)
        name = parameters.pop("name", None)
    name = checks.choice("sampling", name, tuple(_KNOWN))
    return dataclasses.replace(_KNOWN[name], **parameters)


def objections(mechanism: Mechanism, participation: Participation) -> dict[str, str]:
    """For every sampling, why it has no valid analysis for a mechanism; "" if it has one.

    >>> import corrnoise as cn
    >>> m = cn.mechanisms.bisr(cn.workloads.prefix_sum(100), num_bands=4)
    >>> found = objections(m, cn.Participation(100, 10, 10))
    >>> [found[name] == "" for name in ("fixed", "balls-in-bins", "poisson")]
    [True, True, False]
    """
    return {name: each.objection(mechanism, participation) for name, each in _KNOWN.items()}


def require(sampling: Sampling, mechanism: Mechanism, participation: Participation) -> None:
    """Raise a ``ValueError`` unless the sampling has a valid analysis for the mechanism."""
    reason = sampling.objection(mechanism, participation)
    if reason:
        valid = [name for name, why in objections(mechanism, participation).items() if not why]
        raise ValueError(
            f"sampling={sampling.name!r} cannot be priced for {mechanism!r}: {reason}; "
            f"valid here: {', '.join(valid)}"
        )


def delta_rounded_up(delta: float) -> float:
    """Round δ up by more than the arithmetic error; never to 0, as no Gaussian noise has δ = 0."""
    if math.isnan(delta):
        raise ArithmeticError("δ is not a number")
    return min(max(delta * (1.0 + _ROUNDING), sys.float_info.min), 1.0)


def by_step(precision: Array, outputs: Array) -> Array:
    """The log-likelihood ratio of each step by itself if it takes the example, n × m.

    Inner products of different steps, which a fitted ``precision`` may have, are left out.
    """
    return precision @ outputs - 0.5 * np.diag(precision)[:, None]


def by_batch(
    participation: Participation, precision: Array, outputs: Array, means: Array | None
) -> Array:
    """The log-likelihood ratios given the batch of the first epoch, b × m, if batches repeat."""
    n, b = participation.num_steps, participation.min_sep
    usual = (np.arange(n)[None, :] % b == np.arange(b)[:, None]).astype(np.float64)
    expected = usual if means is None else means
    weights = expected @ precision
    return weights @ outputs - 0.5 * np.sum(weights * expected, axis=1)[:, None]
