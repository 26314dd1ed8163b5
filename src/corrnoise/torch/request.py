"""From the arguments of ``make_private`` to a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from corrnoise import checks
from corrnoise.accounting import Calibration, Sampling, account, calibrate
from corrnoise.accounting.progress import Progress
from corrnoise.mechanisms import DenseMechanism, Mechanism, build
from corrnoise.noise.filters import Filter
from corrnoise.participation import Participation
from corrnoise.planning import Plan
from corrnoise.planning import plan as best_plan
from corrnoise.torch.optimizers import workload_of
from corrnoise.torch.processes import Processes
from corrnoise.workloads import Workload


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
        num_bands: for a name.
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
    mechanism: str | Mechanism | DenseMechanism | None
    num_bands: Any
    sampling: Sampling | None
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
        mechanism = self._mechanism(part)
        found = account(
            mechanism,
            part,
            noise_multiplier=noise_multiplier,
            delta=delta or 0.1 / self.num_examples,
            sampling=self._sampling(mechanism.name),
            progress=self.progress,
        )
        return self._plan(found)

    def with_epsilon(self, epsilon: float, delta: float) -> Plan:
        """The plan of a run that spends (ε, δ)."""
        if self.mechanism == "best":
            return self._best(epsilon, delta)
        part = self._participation()
        mechanism = self._mechanism(part)
        found = calibrate(
            mechanism,
            part,
            epsilon=epsilon,
            delta=delta,
            sampling=self._sampling(mechanism.name),
            progress=self.progress,
        )
        return self._plan(found)

    def _plan(self, calibration: Calibration) -> Plan:
        return Plan(
            num_examples=self.num_examples,
            batch_size=min(self.batch_size, self.num_examples),
            calibration=calibration,
            memory=self.memory,
            rounds=self.rounds,
        )

    @staticmethod
    def agreed(processes: Processes, make: Callable[[], Plan]) -> Plan:
        """The plan that the first process makes; all of them use it."""
        if processes.world_size == 1:
            return make()
        return Plan.from_json(processes.agree(lambda: make().to_json()))

    def _participation(self) -> Participation:
        if self.epochs is None:
            raise ValueError(
                "epochs must be given, or plan=: correlated noise is planned for a number of steps"
            )
        epochs = checks.integer("epochs", self.epochs, 1)
        return Participation(epochs * self.min_sep, self.min_sep, epochs)

    def _mechanism(self, part: Participation) -> Mechanism | DenseMechanism:
        """The mechanism as the noise will run it, in float32."""
        wanted = "bisr" if self.mechanism is None else self.mechanism
        if isinstance(wanted, str):
            wanted = build(wanted, self._workload(part.num_steps), part, self._size(wanted, part))
        elif wanted.num_steps != part.num_steps:
            raise ValueError(
                f"mechanism must be planned for {part.num_steps} steps ({self.epochs} epochs of "
                f"{self.min_sep}), got {wanted.num_steps}; build it for this run"
            )
        return Filter.of(wanted).realized

    def _size(self, name: str, part: Participation) -> Any:
        """The paper's choices where the user makes none: 4 bands of C⁻¹, b of C, 4 buffers."""
        if self.num_bands is not None or name in ("dp_sgd", "dense"):
            return self.num_bands
        return part.min_sep if name in ("bsr", "band_mf") else min(4, part.num_steps)

    def _workload(self, num_steps: int) -> Workload:
        return self.workload or workload_of(self.optimizer, num_steps)

    def _sampling(self, name: str) -> Sampling:
        if self.sampling is not None:
            return self.sampling
        if not self.poisson_sampling:
            return "fixed"
        return "poisson" if name == "dp_sgd" else "balls-in-bins"

    def _best(self, epsilon: float, delta: float) -> Plan:
        part = self._participation()
        workload = self._workload(part.num_steps)
        if workload.momentum is None or workload.decay is None:
            raise ValueError(
                f"mechanism='best' needs SGD with momentum and decay, got {workload!r}; "
                "name a mechanism, or pass plan="
            )
        return best_plan(
            num_examples=self.num_examples,
            batch_size=min(self.batch_size, self.num_examples),
            steps=part.num_steps,
            epsilon=epsilon,
            delta=delta,
            momentum=workload.momentum,
            decay=workload.decay,
            sampling=self._sampling("best"),
            memory=self.memory,
            rounds=self.rounds,
            progress=self.progress,
        )
