"""Hugging Face's Trainer with a privacy budget: correlated noise, exact resume, a statement."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import TrainOutput

from corrnoise import samplings
from corrnoise.noise import Key
from corrnoise.planning import Plan
from corrnoise.samplings import Sampling
from corrnoise.torch import Adam, AdamW, PrivacyEngine, checkpoint
from corrnoise.transformers import losses
from corrnoise.transformers.batches import LogicalBatches
from corrnoise.transformers.begun import Begun, begun
from corrnoise.transformers.budget import Budget
from corrnoise.transformers.files import STATE, last_checkpoint, write_beside
from corrnoise.transformers.refusals import OneRowEach, check_arguments, check_model

# The optimizers of torch that have a counterpart that knows the noise.
_AWARE: dict[Any, Any] = {torch.optim.Adam: Adam, torch.optim.AdamW: AdamW}
# Numbers of the loop that are computed from private examples without noise.
_PRIVATE = ("loss", "train_loss", "grad_norm", "total_flos")


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` whose training is differentially private.

    All arguments are those of Hugging Face's Trainer; the budget comes by name. A step takes a
    random batch of ``per_device_train_batch_size * gradient_accumulation_steps`` expected examples,
    ``per_device_train_batch_size`` of them at a time. ``max_grad_norm`` is the clip norm of each
    example's gradient, and an example is a row of ``train_dataset``. AdamW and Adam, the Trainer's
    own, are those that know the noise. Checkpoints have the state of the run beside the model.

    Guarantees: what the plan states, for everything that is written: the weights, and neither
    training losses nor norms of gradients, which have no noise and are not logged. Metrics of the
    evaluation set are not covered; it must not contain training examples.

    Args:
        model: as in transformers.
        args: as in transformers; what breaks the guarantee is refused.
        positional: the others of transformers, in its order.
        target_epsilon: ε of the whole run.
        target_delta: δ.
        plan: from ``corrnoise.plan`` or a file, instead of a target.
        mechanism: the name of a family; "best" lets the planner choose.
        num_bands: p of the mechanism.
        sampling: as in ``corrnoise.plan``.
        key: a ``Key`` or the path of its file; ``OUTPUT_DIR.key``, beside the folder, by default.
            Store it apart from the checkpoints.
        ledger: the path of the ledger; ``OUTPUT_DIR/ledger`` by default.
        publishes: as in ``PrivacyEngine``; a GPU needs "checkpoints" to resume.
        log_training_loss: whether the loop logs losses of private examples, which have no noise:
            for looking at, not for publishing.
        options: the others of transformers.

    Attributes:
        engine: the ``PrivacyEngine`` of the last ``train()``: its plan, ε and statement.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *positional: Any,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        plan: Plan | None = None,
        mechanism: str = "best",
        num_bands: int | None = None,
        sampling: str | Sampling = samplings.DRAWN,
        key: Key | str | os.PathLike[str] | None = None,
        ledger: str | os.PathLike[str] | None = None,
        publishes: Literal["steps", "checkpoints"] = "steps",
        log_training_loss: bool = False,
        **options: Any,
    ) -> None:
        self._budget = Budget(target_epsilon, target_delta, plan, mechanism, num_bands, sampling)
        args = transformers.TrainingArguments("tmp_trainer") if args is None else copy.copy(args)
        check_arguments(args)
        self._accumulated = int(args.gradient_accumulation_steps)
        # A step of the loop is a step of the run: its pieces are taken inside ``training_step``,
        # and the run's own loader goes on where the run stands.
        args.gradient_accumulation_steps = 1
        args.ignore_data_skip = True
        self._publishes: Literal["steps", "checkpoints"] = publishes
        self._folder = folder = Path(args.output_dir).absolute()
        self._key = folder.with_name(folder.name + ".key") if key is None else key
        self._ledger = folder / "ledger" if ledger is None else Path(ledger)
        self._apart = [n for n, v in (("key", key), ("ledger", ledger)) if v is not None]
        self._log_training_loss = log_training_loss
        self._begun: Begun | None = None
        self._resumed: Path | None = None
        self._in_step = False  # whether a loss is that of training
        self.engine: PrivacyEngine | None = None
        self._batches: LogicalBatches | None = None
        super().__init__(model, args, *positional, **options)
        self._given = (self.optimizer, self.lr_scheduler)
        self.add_callback(_Run(self))

    @property
    def private_engine(self) -> PrivacyEngine:
        """The engine of a run that has begun."""
        if self.engine is None:
            raise ValueError("train() must come first: there is no run yet")
        return self.engine

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """As in transformers; a resumed run is bit-equal to one that was never interrupted.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the last complete one; where
                there is none yet, the run begins anew and repeats its steps.
            args: as in transformers.
            options: as in transformers.

        Raises:
            ValueError: among others, the output folder has a run that this one does not repeat.
        """
        last = last_checkpoint(self._folder)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last
        self._begun = None
        if not resume_from_checkpoint:
            self._begun = begun(
                self._folder, self._ledger, apart=self._apart, checkpoint=last is not None
            )
        self._resumed = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        if self._resumed is not None and not (self._resumed / STATE).exists():
            raise ValueError(
                f"resume_from_checkpoint must be a checkpoint of a private run, got "
                f"{self._resumed} without {STATE}; load its weights into the model and begin a "
                "new run"
            )
        if self.engine is not None:  # a run of its own again, also one that was interrupted
            if self._given[0] is not None:
                raise ValueError(
                    "optimizers must be new ones for each run, and train() was called before with "
                    "those that the Trainer was given; make another Trainer with new ones, or "
                    "give optimizer_cls_and_kwargs, from which each train() makes its own"
                )
            self.optimizer, self.lr_scheduler = self._given
        try:
            found = super().train(resume_from_checkpoint or None, *args, **options)
        except ValueError as error:
            explained = error if self._begun is None else self._begun.explained(error)
            if explained is error:
                raise
            raise explained from None
        finally:
            vars(self.accelerator).pop("backward", None)
            if self.engine is not None:
                self.engine.close()
        if self._log_training_loss:
            return found
        metrics = {name: value for name, value in found.metrics.items() if name not in _PRIVATE}
        return TrainOutput(found.global_step, math.nan, metrics)

    def get_train_dataloader(self) -> Any:
        """The batches of the run: an item for each step."""
        if isinstance(self.train_dataset, IterableDataset):
            raise ValueError(
                "train_dataset must have indices, got an IterableDataset; the plan says which "
                "example takes part when: load it as a map-style dataset, without streaming=True"
            )
        prepared = super().get_train_dataloader()
        given: Any = getattr(prepared, "base_dataloader", prepared)
        batch_size = self.args.per_device_train_batch_size * self._accumulated
        plain: DataLoader[Any] = DataLoader(
            given.dataset,
            batch_size=batch_size,
            shuffle=True,
            collate_fn=OneRowEach(given.collate_fn),
            num_workers=given.num_workers,
            pin_memory=given.pin_memory,
            persistent_workers=given.persistent_workers,
            prefetch_factor=given.prefetch_factor,
        )
        self._batches = LogicalBatches(plain)
        return self._batches

    @staticmethod
    def get_optimizer_cls_and_kwargs(*args: Any, **options: Any) -> tuple[Any, Any]:
        """As in transformers, but Adam and AdamW know the noise."""
        kind, settings = transformers.Trainer.get_optimizer_cls_and_kwargs(*args, **options)
        if kind in _AWARE:
            settings = {name: value for name, value in settings.items() if name != "fused"}
        return _AWARE.get(kind, kind), settings

    def training_step(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
        """Forward and backward for every piece of a batch; the mean loss of its examples."""
        total, count = torch.zeros((), device=self.args.device), 0
        self._in_step = True
        try:
            for piece in inputs:
                size = len(next(v for v in piece.values() if isinstance(v, Tensor)))
                total = total + size * super().training_step(model, piece)
                count += size
        finally:
            self._in_step = False
        return total / max(count, 1)

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """As in transformers, but in training every example counts alike, however long it is."""
        if not self._in_step:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = self._mean_over_examples(model, inputs)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """As in transformers, without what is computed from private examples."""
        if not self._log_training_loss:
            logs = {name: value for name, value in logs.items() if name not in _PRIVATE}
        super().log(logs, *args, **options)

    def floating_point_ops(self, inputs: Any) -> int:
        """0: the number depends on the lengths of private examples, and would be saved."""
        return 0

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in transformers; the state of the run or its statement is saved beside the model."""
        place = Path(output_dir) if output_dir else self._folder
        if self.engine is not None:
            self.engine.publish()
        if _internal_call and self.engine is not None:
            # First, so that a checkpoint with a model has it.
            place.mkdir(parents=True, exist_ok=True)
            checkpoint.save(self.engine.state_dict(), place / STATE)
        super().save_model(output_dir, _internal_call)
        if not _internal_call and self.engine is not None:
            write_beside(self.engine, place, self._about())

    def _backward(self, loss: Tensor, **options: Any) -> None:
        """In the place of Accelerate's: the size of a piece rounds no gradient."""
        if loss.dtype == torch.float32:
            self.private_engine.backward(loss)
        else:  # of a model in 16 bits that computes its loss itself
            loss.backward(**options)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Nothing: each example's gradient is clipped by the run."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Nothing: it has no noise."""

    def _mean_over_examples(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        given = dict(inputs)
        inner = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        shift = losses.shift_of(inner)
        labels = given.get("labels")
        if shift is None or labels is None or self.compute_loss_func is not None:
            pair: Any = super().compute_loss(model, given, return_outputs=True)
            return pair
        del given["labels"]
        outputs = model(**given)
        smoothing = float(self.args.label_smoothing_factor)
        found = losses.mean_over_examples(outputs.logits, labels, shift=shift, smoothing=smoothing)
        return found, outputs

    def begin(self) -> None:
        """Start the run, when the loop is about to begin: model and optimizer are ready."""
        assert self._batches is not None
        plain, model = self._batches.plain, cast(nn.Module, self.model_wrapped)
        num_steps = int(self.state.max_steps)
        self._budget.check(plain, num_steps, self._accumulated)
        if self._begun is not None:
            self._begun.check(
                **self._budget.fields(plain, num_steps),
                max_grad_norm=self.args.max_grad_norm,
                publishes=self._publishes,
            )
        check_model(self.model)
        self._check_loss(model, plain)
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        state = None if self._resumed is None else checkpoint.load(self._resumed / STATE)
        engine = PrivacyEngine(key=self._key, ledger=self._ledger, publishes=self._publishes)
        self._ledger.parent.mkdir(parents=True, exist_ok=True)
        _, _, self._batches.private = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=plain,
            max_grad_norm=self.args.max_grad_norm,
            plan=self._budget.planned(plain, num_steps, optimizer, state),
            grad_sample_mode="one_pass",
            max_physical_batch_size=self.args.per_device_train_batch_size,
        )
        self.engine = engine
        vars(self.accelerator)["backward"] = self._backward
        if state is not None:
            engine.load_state_dict(state)

    def _check_loss(self, model: nn.Module, plain: DataLoader[Any]) -> None:
        """Raise unless the loss treats the examples of a batch apart, with padding too."""

        def loss(batch: Any) -> Tensor:
            inputs: Any = self._prepare_inputs(batch)
            found: Any = self.compute_loss(model, inputs, num_items_in_batch=None)
            return found

        self._in_step = True
        try:
            losses.check(model, loss, plain.collate_fn, losses.picked(plain.dataset))
        finally:
            self._in_step = False

    def _about(self) -> dict[str, Any]:
        model: Any = self.model
        dataset: Any = self.train_dataset
        return {
            "data": {"name": "train_dataset", "num_train": len(dataset)},
            "model": {
                "name": type(model).__name__,
                "num_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            },
            "settings": {
                "learning_rate": self.args.learning_rate,
                "clip_norm": self.args.max_grad_norm,
                "seed": self.args.seed,
            },
        }

    def finish(self) -> None:
        """Write the statement and the report beside the model, which may leave the process now."""
        self.private_engine.publish()
        write_beside(self.private_engine, self._folder, self._about(), report_too=True)


class _Run(transformers.TrainerCallback):
    """Begins the run when the loop does, and ends it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Model, optimizer and schedule are ready, and no batch was fetched."""
        self._trainer.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say how many epochs have passed: after a resume the loop counts from a whole one."""
        engine = self._trainer.private_engine
        state.epoch = engine.steps_taken / engine.plan.participation.min_sep

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The weights are final."""
        self._trainer.finish()


__all__ = ["Trainer"]
