"""From the arguments of ``make_private`` to a plan, and whether a plan fits a loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from corrnoise import _checks as checks
from corrnoise import mechanisms, samplings
from corrnoise._progress import Bar, Progress
from corrnoise.mechanisms import Mechanism
from corrnoise.participation import Participation
from corrnoise.planning import Plan
from corrnoise.planning import plan as best_plan
from corrnoise.planning.verification import trust
from corrnoise.samplings import Calibration, Sampling, calibrate
from corrnoise.samplings.functions import check_noise
from corrnoise.torch.announcing import announce, announce_delta
from corrnoise.torch.processes import Processes
from corrnoise.torch.without_noise import not_private
from corrnoise.torch.workload import workload_of
from corrnoise.workloads import Workload

# What make_private takes where no mechanism is named, and make_private_with_epsilon: there the
# planner chooses sampling and mechanism, so that the error is at most that of Opacus's method.
DEFAULT_WITH_NOISE = "bisr"
DEFAULT_WITH_EPSILON = "best"


@dataclass(frozen=True)
class Request:
    """What the user asked for, before anything is computed.

    Attributes:
        optimizer: whose momentum and decay choose the workload.
        num_examples: of the dataset.
        batch_size: of the user's loader.
        min_sep: b, its batches in an epoch.
        epochs: how long the run is.
        mechanism: a name, "best", or a mechanism.
        num_bands: the size, for a name.
        sampling: or ``None`` for the mechanism's usual one.
        poisson_sampling: Opacus's flag; ``False`` means fixed batches.
        workload: or ``None`` for the optimizer's.
        memory: the budget of the noise.
        rounds: of ChaCha.
        progress: of the accountant.
    """

    optimizer: torch.optim.Optimizer
    num_examples: int
    batch_size: int
    min_sep: int
    epochs: int | None
    mechanism: str | Mechanism | None
    num_bands: Any
    sampling: str | Sampling | None
    poisson_sampling: bool
    workload: Workload | None
    memory: float
    rounds: int
    progress: Progress | bool | None

    def with_noise(self, noise_multiplier: float | None, delta: float | None) -> Plan:
        """The plan of a run with this noise, priced at δ."""
        if noise_multiplier is None:
            raise ValueError(
                "noise_multiplier must be given, or plan=; to aim at an ε use "
                "make_private_with_epsilon"
            )
        part = self._participation()
        wanted = DEFAULT_WITH_NOISE if self.mechanism is None else self.mechanism
        mechanism = self._mechanism(part, wanted)
        sampling, delta = self._sampling(mechanism, part), delta or 0.1 / self.num_examples
        if noise_multiplier == 0.0:
            return self._plan(not_private(mechanism, part, sampling, delta))
        samplings.require(sampling, mechanism, part)
        sigma = check_noise(mechanism, part, noise_multiplier)
        found = sampling.without_draws(mechanism, part, sigma, checks.probability("delta", delta))
        announce(found)
        return self._plan(found)

    def with_epsilon(self, epsilon: float, delta: float) -> Plan:
        """The plan of a run that spends (ε, δ)."""
        part = self._participation()
        announce_delta(checks.probability("target_delta", delta), self.num_examples)
        wanted = self.mechanism
        if wanted is None:
            plannable = _plannable(self._workload(part.num_steps)) and self.num_bands is None
            wanted = DEFAULT_WITH_EPSILON if plannable else DEFAULT_WITH_NOISE
        if wanted == "best":
            return self._best(epsilon, delta)
        mechanism = self._mechanism(part, wanted)
        found = calibrate(
            mechanism,
            part,
            epsilon=epsilon,
            delta=delta,
            sampling=self._sampling(mechanism, part),
            progress=self._shown("calibrating the noise"),
        )
        return self._plan(found)

    def _plan(self, calibration: Calibration) -> Plan:
        plan = Plan(
            num_examples=self.num_examples,
            batch_size=min(self.batch_size, self.num_examples),
            calibration=calibration,
            memory=self.memory,
            rounds=self.rounds,
        )
        trust(plan)  # it was priced just now
        return plan

    def _participation(self) -> Participation:
        if self.epochs is None:
            raise ValueError(
                "epochs must be given, or plan=: correlated noise is planned for a number of steps"
            )
        epochs = checks.integer("epochs", self.epochs, 1)
        return Participation(epochs * self.min_sep, self.min_sep, epochs)

    def _mechanism(self, part: Participation, wanted: str | Mechanism) -> Mechanism:
        """The mechanism as the noise will run it, in float32."""
        if isinstance(wanted, str):
            family = mechanisms.get(wanted)
            size = family.usual(part) if self.num_bands is None else self.num_bands
            wanted = family.build(self._workload(part.num_steps), part, size)
        elif wanted.num_steps != part.num_steps:
            raise ValueError(
                f"mechanism must be planned for {part.num_steps} steps ({self.epochs} epochs of "
                f"{self.min_sep}), got {wanted.num_steps}; build it for this run"
            )
        return wanted.in_float32()

    def _workload(self, num_steps: int) -> Workload:
        return self.workload or workload_of(self.optimizer, num_steps)

    def _sampling_or_best(self) -> str | Sampling:
        """As asked for; else the best of all, or of those without random batches."""
        if self.sampling is not None:
            return self.sampling
        return samplings.BEST if self.poisson_sampling else samplings.FIXED

    def _sampling(self, mechanism: Mechanism, part: Participation) -> Sampling:
        """As asked for; else Opacus's own where that is valid, or the one for correlated noise."""
        if self.sampling is not None:
            return samplings.get(self.sampling)
        if not self.poisson_sampling:
            return samplings.FIXED
        if not samplings.POISSON.objection(mechanism, part):
            return samplings.POISSON
        return samplings.get(samplings.DRAWN)

    def _best(self, epsilon: float, delta: float) -> Plan:
        part = self._participation()
        workload = self._workload(part.num_steps)
        if not _plannable(workload):
            raise ValueError(
                f"mechanism='best' needs SGD with momentum and decay, got {workload!r}; "
                "name a mechanism, or pass plan="
            )
        return best_plan(
            num_examples=self.num_examples,
            batch_size=min(self.batch_size, self.num_examples),
            num_steps=part.num_steps,
            epsilon=epsilon,
            delta=delta,
            momentum=workload.momentum or 0.0,
            decay=1.0 if workload.decay is None else workload.decay,
            sampling=self._sampling_or_best(),
            memory=self.memory,
            rounds=self.rounds,
            progress=self._shown("planning"),
        )

    def _shown(self, title: str) -> Progress | bool:
        """The user's progress function, or a bar that appears after a second."""
        return Bar(title) if self.progress is None else self.progress


def _plannable(workload: Workload) -> bool:
    """Whether the workload is SGD with momentum and decay, which the planner takes."""
    return workload.momentum is not None and workload.decay is not None


def agreed(processes: Processes, make: Callable[[], Plan]) -> Plan:
    """The plan that the first process makes; all of them use it."""
    if processes.world_size == 1:
        return make()
    plan = Plan.from_json(processes.agree(lambda: make().to_json()))
    trust(plan)  # it was priced by the first process of this run
    return plan


def _verify(plan: Plan, processes: Processes) -> None:
    """Verify the plan in the first process; raise unless it is the plan of the others too."""
    with Bar("verifying the plan") as progress:
        if processes.world_size == 1:
            plan.verified(progress)
            return
        first = processes.agree(lambda: plan.verified(progress).to_json())
    if first != plan.to_json():
        raise ValueError(
            "plan must be the same in every process, got one that differs from the first "
            "process's; read it from the same file"
        )


def check_plan(
    plan: Plan,
    loader: DataLoader[Any],
    epochs: int | None,
    processes: Processes | None = None,
) -> None:
    """Raise unless the plan guarantees what it states, fits the loader, and was priced as it runs.

    Only the first of several processes verifies; the plan of the others must be the same.
    """
    _verify(plan, processes or Processes())
    size, batches = len(loader.dataset), len(loader)  # type: ignore[arg-type]
    if plan.num_examples != size:
        raise ValueError(
            f"data_loader must have the plan's {plan.num_examples} examples, got {size}; "
            "plan for this dataset"
        )
    if plan.participation.min_sep != batches:
        raise ValueError(
            f"data_loader must have the plan's {plan.participation.min_sep} batches in an epoch, "
            f"got {batches}; use batch_size={plan.batch_size} without drop_last, or plan for this "
            "loader"
        )
    steps = plan.num_steps if epochs is None else epochs * batches
    if steps != plan.num_steps:
        raise ValueError(
            f"epochs must be the plan's ({plan.num_steps} steps), got {epochs} ({steps} steps); "
            "drop the argument, or plan for as many"
        )
    if plan.mechanism.in_float32() != plan.mechanism:
        raise ValueError(
            f"plan must be priced for the coefficients that run, rounded to float32, got "
            f"{plan.mechanism!r} before rounding, whose sensitivity may be smaller; use "
            "corrnoise.plan, or calibrate mechanism.in_float32()"
        )
