"""What a run of the Trainer may spend: a target that the planner meets, or a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from corrnoise.planning import Plan
from corrnoise.planning import plan as best_plan
from corrnoise.samplings import Sampling
from corrnoise.torch import workload_of


@dataclass(frozen=True)
class Budget:
    """The arguments of the Trainer that decide its plan.

    Attributes:
        epsilon: the target, or ``None`` where a plan was given.
        delta: likewise.
        plan: that was given, or ``None``.
        mechanism: the name of a family; "best" lets the planner choose.
        num_bands: p of the mechanism.
        sampling: as in ``corrnoise.plan``.

    Raises:
        ValueError: there are a target and a plan, or neither.
    """

    epsilon: float | None
    delta: float | None
    plan: Plan | None
    mechanism: str
    num_bands: int | None
    sampling: str | Sampling

    def __post_init__(self) -> None:
        if (self.epsilon is None or self.delta is None) == (self.plan is None):
            raise ValueError(
                "give the budget, target_epsilon and target_delta, or a plan; got "
                f"target_epsilon={self.epsilon}, target_delta={self.delta} and "
                f"{'a' if self.plan is not None else 'no'} plan"
            )

    def check(self, loader: DataLoader[Any], num_steps: int, pieces: int) -> None:
        """Raise unless a run has the data, batches and length of the plan that was given.

        Args:
            loader: of the batches that the plan's take the place of.
            num_steps: of the run.
            pieces: physical batches in a batch.
        """
        plan, size, whole = self.plan, _size(loader), loader.batch_size or 1
        if plan is None:
            return
        if size != plan.num_examples:
            raise ValueError(
                f"train_dataset must have the plan's {plan.num_examples} examples, got {size}; "
                "restore it or make the plan again"
            )
        if len(loader) != plan.participation.min_sep:
            raise ValueError(
                "per_device_train_batch_size * gradient_accumulation_steps must be "
                f"{plan.batch_size}, the plan's batch size, got {whole // pieces} * {pieces} = "
                f"{whole}; change them or make the plan again"
            )
        if num_steps > plan.num_steps:
            raise ValueError(
                f"the run must not be longer than its plan, {plan.num_steps} steps, got "
                f"{num_steps} by num_train_epochs or max_steps"
            )

    def fields(self, loader: DataLoader[Any], num_steps: int) -> dict[str, Any]:
        """The fields of the plan that are known before it is made."""
        if self.plan is not None:
            names = ("epsilon", "delta", "num_steps", "num_examples", "batch_size")
            return {name: getattr(self.plan, name) for name in names}
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "num_steps": num_steps,
            "num_examples": _size(loader),
            "batch_size": _batch(loader),
        }

    def planned(
        self,
        loader: DataLoader[Any],
        num_steps: int,
        optimizer: Any,
        state: Mapping[str, Any] | None,
    ) -> Plan:
        """The plan that was given, that of the run that is resumed, or the planner's.

        Args:
            loader: of the batches that the plan's take the place of.
            num_steps: of the run.
            optimizer: torch's; its momentum and decay choose the workload.
            state: of the engine, from the checkpoint that is resumed.
        """
        if self.plan is not None:
            return self.plan
        epsilon, delta = self.epsilon, self.delta
        assert epsilon is not None
        assert delta is not None
        if state is not None:
            found = Plan.from_json(state["header"]["plan"])
            if (found.epsilon, found.delta, found.num_steps) != (epsilon, delta, num_steps):
                raise ValueError(
                    f"a resumed run must keep its budget and length, ({found.epsilon:g}, "
                    f"{found.delta:g}) for {found.num_steps} steps, got ({epsilon:g}, {delta:g}) "
                    f"for {num_steps}; restore them, or begin a new run in a new output_dir"
                )
            return found
        if num_steps < len(loader):
            raise ValueError(
                f"max_steps must be at least one epoch, {len(loader)} steps, got {num_steps}: the "
                "batches of a plan go through all examples; for a quick look take fewer of them, "
                "train_dataset.select(range(100))"
            )
        workload = workload_of(optimizer, num_steps)
        if workload.momentum is None or workload.decay is None:
            raise ValueError(
                f"the optimizer must be Adam's kind or SGD without Nesterov momentum for a plan by "
                f"budget, got {type(optimizer).__name__}; pass plan="
            )
        return best_plan(
            num_examples=_size(loader),
            batch_size=_batch(loader),
            num_steps=num_steps,
            epsilon=epsilon,
            delta=delta,
            momentum=workload.momentum,
            decay=workload.decay,
            sampling=self.sampling,
            mechanisms=None if self.mechanism == "best" else [self.mechanism],
            num_bands=self.num_bands,
            progress=True,
        )


def _size(loader: DataLoader[Any]) -> int:
    return len(loader.dataset)  # type: ignore[arg-type]


def _batch(loader: DataLoader[Any]) -> int:
    return min(loader.batch_size or 1, _size(loader))
