"""Opacus's privacy engine with correlated noise: make_private, checkpoints, ε, a statement."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from corrnoise import _checks as checks
from corrnoise._progress import Progress
from corrnoise.auditing import Audit
from corrnoise.mechanisms import Mechanism
from corrnoise.noise import Key
from corrnoise.planning import Plan
from corrnoise.records import Statement
from corrnoise.samplings import Sampling
from corrnoise.torch import accelerated, checkpoint, opacus, owners, requirements, resume
from corrnoise.torch.accountant import Accountant, Entry
from corrnoise.torch.audit import audit
from corrnoise.torch.captured import CapturedStep, usual_size
from corrnoise.torch.loader import batch_size, check_loader, num_examples, users_loader
from corrnoise.torch.modes import chosen_mode
from corrnoise.torch.one_pass import OnePassSums
from corrnoise.torch.options import Options, refuse
from corrnoise.torch.plans import Request, agreed, check_plan
from corrnoise.torch.processes import Processes
from corrnoise.torch.setup import Setup, set_up
from corrnoise.torch.stating import statement
from corrnoise.torch.without_noise import is_private
from corrnoise.workloads import Workload


class PrivacyEngine:
    """Drop-in for ``opacus.PrivacyEngine``: one changed import, correlated noise.

    Clipping is our own, in one backward pass, or any of Opacus's modes. What changes besides is the
    noise (correlated across steps, from a cryptographic stream), the batches (those that the plan
    was priced for), the accounting (the plan's own analysis) and the checkpoints (exact resume).

    Guarantees: every step that is released was planned, checked and, with a ledger, written down
    first. The privacy of the run is the plan's; it depends on neither the optimizer nor the model.

    Args:
        accountant: accepted for the sake of Opacus's scripts, with a warning: ε comes from the
            plan.
        secure_mode: sums of clipped gradients and releases without rounding: what is released is a
            correctly rounded value of the continuous mechanism, and the guarantee no longer assumes
            arithmetic without rounding. For one process, modes that store the gradient of each
            example ("hooks", which "auto" becomes), and a banded C⁻¹; it is slower. The noise is
            cryptographic with and without it.
        key: the secret of the noise and the batches: a ``Key``, or a path where it is kept (mode
            0600, made if it is not there; keep it apart from checkpoints). From the operating
            system, and forgotten with the process, by default.
        ledger: a path for the ledger of released steps. With a path for the key, it makes a run
            that can resume.
        memory: model-sized vectors that the noise may store to save time; see ``CorrelatedNoise``.
            A ``plan`` that is given to ``make_private`` has its own.
        rounds: of ChaCha, likewise.
        workload: what the noise is chosen for, instead of what is read from the optimizer.
        delta: where ``make_private`` with a noise multiplier states ε; 1/(10·number of examples) by
            default.
        data_fingerprint: a name for the dataset, instead of a digest of some examples.
        progress: as in ``calibrate``.
        settings: plain values that must not change until the end of the run, such as the learning
            rate; a resume with others is refused.
        publishes: what leaves the process. With "steps", the default, every step counts as released
            when it is taken, and a resumed run must repeat steps bit for bit, which a GPU whose
            kernels add in another order does not. With "checkpoints" only what
            ``save_checkpoint`` writes is published, and metrics computed from it: the steps after
            the last checkpoint of a crashed run may be repeated with other rounding. Logs, metrics
            or copies of the weights of such lost steps would break the guarantee.
    """

    def __init__(
        self,
        *,
        accountant: str | None = None,
        secure_mode: bool = False,
        key: Key | str | os.PathLike[str] | None = None,
        ledger: str | os.PathLike[str] | None = None,
        memory: float = 0,
        rounds: int = 20,
        workload: Workload | None = None,
        delta: float | None = None,
        data_fingerprint: str | None = None,
        progress: Progress | bool | None = None,
        settings: Mapping[str, Any] | None = None,
        publishes: Literal["steps", "checkpoints"] = "steps",
    ) -> None:
        checks.choice("publishes", publishes, ("steps", "checkpoints"))
        if accountant is not None:
            warnings.warn(
                f"accountant={accountant!r} is not used: ε comes from the plan's own analysis",
                stacklevel=2,
            )
        self.secure_mode = secure_mode
        self._key_source = key
        self._ledger_path = None if ledger is None else Path(ledger)
        self._memory, self._rounds = memory, rounds
        self._workload, self._delta = workload, delta
        self._data_fingerprint, self._progress = data_fingerprint, progress
        self._settings, self._publishes = dict(settings or {}), publishes
        self._setup: Setup | None = None
        self._warned = False  # that checkpoints cannot be resumed
        self._inherited: list[Entry] = []  # of a checkpoint that is not private
        self.accountant = Accountant(self.get_epsilon, self._history)

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        max_grad_norm: float | list[float],
        noise_multiplier: float | None = None,
        epochs: int | None = None,
        mechanism: str | Mechanism | None = None,
        num_bands: Any = None,
        sampling: str | Sampling | None = None,
        plan: Plan | None = None,
        criterion: Any = None,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "auto",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        max_physical_batch_size: int | None = None,
        views: int = 1,
        **unknown: Any,
    ) -> Any:
        """As ``opacus.PrivacyEngine.make_private``, with the noise of a plan.

        Give either ``plan``, or ``noise_multiplier`` and ``epochs``.

        Args:
            module: the model; for many processes, one wrapped for DDP or by ``fully_shard``.
            optimizer: any of torch's; its momentum and decay choose the workload.
            data_loader: it says how many batches an epoch has; its sampler is replaced.
            max_grad_norm: the clip norm; a list of them for ``clipping="per_layer"``.
            noise_multiplier: the standard deviation of z over the clip norm. 0 is a mode of its
                own, to debug: there is no noise, the run is not private, and ε is ∞.
            epochs: how long the run is planned for.
            mechanism: a name ("bisr" by default) or a ``Mechanism``.
            num_bands: p for a mechanism that is named, or the buffers of "blt"; by default 4, and b
                for "bsr" and "band_mf".
            sampling: as in ``calibrate``; by default "fixed" if not ``poisson_sampling``, else
                "poisson" for dp_sgd and "balls-in-bins" for the others.
            plan: everything at once, from ``corrnoise.plan`` or a file.
            criterion: the loss, for the ghost modes; cross entropy by default.
            batch_first: Opacus's.
            loss_reduction: Opacus's; "mean" divides by the plan's divisor.
            poisson_sampling: ``False`` is short for ``sampling="fixed"``.
            clipping: "flat" or "per_layer".
            noise_generator: keeps Opacus's own normals, from this generator, instead of the
                cryptographic stream; for dp_sgd alone, to compare.
            grad_sample_mode: "one_pass", our own clipping in one backward pass, which leaves model
                and optimizer as they are; Opacus's hooks, functorch or ew; "ghost" or
                "ghost_fsdp", which are ours too, with a criterion as in Opacus; or "auto": ours for
                every model that it can take, else hooks.
            wrap_model: Opacus's.
            rand_on_empty: an empty batch comes as one random example, for modes that cannot run on
                an empty one, such as "ew"; its gradient is replaced by zeros.
            max_physical_batch_size: how many examples the loader gives at once, for "one_pass"; a
                larger batch comes in pieces, and the optimizer waits for the last of them.
            views: how often the loader reads each example of a batch, for random augmentation, for
                "one_pass": its rows come one after the other, and the mean of their gradients is
                clipped as one. It costs no privacy.
            unknown: refused, with the reason: such as the arguments of adaptive clipping.

        Returns:
            (module, optimizer, data loader), with the criterion before the loader in the ghost
            modes. With "one_pass" module and optimizer are the same objects as before.

        Raises:
            ValueError: the plan does not cover what is asked for, with the reason and the remedy.
        """
        refuse(unknown, clipping, [*signature(self.make_private).parameters])
        data_loader, processes = users_loader(data_loader), Processes.of(module)
        options = Options(
            max_grad_norm, criterion, batch_first, loss_reduction, clipping, noise_generator,
            grad_sample_mode, wrap_model, rand_on_empty, max_physical_batch_size, views,
            exact=self.secure_mode,
        )  # fmt: skip
        options = self._admitted(options, module, optimizer, processes)
        if plan is None:
            request = self._request(
                optimizer, data_loader, epochs, mechanism, num_bands, sampling, poisson_sampling
            )
            if noise_multiplier == 0.0:  # every process knows such a plan by itself
                plan = request.with_noise(0.0, self._delta)
            else:
                plan = agreed(processes, lambda: request.with_noise(noise_multiplier, self._delta))
        elif (noise_multiplier, mechanism, sampling, num_bands, self._workload) != (None,) * 5:
            raise ValueError(
                "plan must come without noise_multiplier, mechanism, sampling, num_bands and "
                "workload: it has its own; drop them"
            )
        check_plan(plan, data_loader, epochs, processes)
        return self._begin(plan, processes, module, optimizer, data_loader, options)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | list[float],
        mechanism: str | Mechanism | None = None,
        num_bands: Any = None,
        sampling: str | Sampling | None = None,
        criterion: Any = None,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "auto",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        max_physical_batch_size: int | None = None,
        views: int = 1,
        epsilon_tolerance: float | None = None,
        **unknown: Any,
    ) -> Any:
        """``make_private`` with the least noise that keeps a budget.

        The arguments that are not described here are those of ``make_private``.

        Args:
            module: the model.
            optimizer: any of torch's.
            data_loader: it says how many batches an epoch has.
            target_epsilon: ε of the whole run.
            target_delta: δ.
            epochs: how long the run is.
            max_grad_norm: the clip norm.
            mechanism: a name, a ``Mechanism``, or "best" to let the planner choose.
            num_bands: as there.
            sampling: as there.
            criterion: as there.
            batch_first: as there.
            loss_reduction: as there.
            poisson_sampling: as there.
            clipping: as there.
            noise_generator: as there.
            grad_sample_mode: as there.
            wrap_model: as there.
            rand_on_empty: as there.
            max_physical_batch_size: as there.
            views: as there.
            epsilon_tolerance: accepted for the sake of Opacus's scripts: the noise is the least
                that keeps the budget up to rounding, and ε never exceeds its target.
            unknown: as there.
        """
        refuse(unknown, clipping, [*signature(self.make_private_with_epsilon).parameters])
        data_loader, processes = users_loader(data_loader), Processes.of(module)
        options = Options(
            max_grad_norm, criterion, batch_first, loss_reduction, clipping, noise_generator,
            grad_sample_mode, wrap_model, rand_on_empty, max_physical_batch_size, views,
            exact=self.secure_mode,
        )  # fmt: skip
        options = self._admitted(options, module, optimizer, processes)
        request = self._request(
            optimizer, data_loader, epochs, mechanism, num_bands, sampling, poisson_sampling
        )
        plan = agreed(processes, lambda: request.with_epsilon(target_epsilon, target_delta))
        return self._begin(plan, processes, module, optimizer, data_loader, options)

    def step_function(
        self, loss: Callable[..., torch.Tensor], *, size: int | None = None
    ) -> CapturedStep:
        """A whole training step as one function of a batch, for models bound by their launches.

        On a GPU forward, backward and clipping run as a CUDA graph of one size: a batch is filled
        up to ``size`` rows with copies whose weight is zero, and a larger one comes in pieces.

        Args:
            loss: of the tensors of a batch: calls the model, and takes the mean over the examples
                (or the sum, as ``loss_reduction`` says).
            size: rows of the graph; by default what a random batch exceeds with probability 1e-6,
                and at most ``max_physical_batch_size``.

        Returns:
            a function to call with the tensors of each batch of the loader.
        """
        run, sums = self._started, self._own_sums
        sums.check_open()
        if size is None:
            usual = usual_size(run.plan, run.processes.world_size)
            size = min(usual, sums.largest or usual)
        return CapturedStep(sums, sums.optimizer, loss, checks.integer("size", size, 1))

    def backward(self, loss: torch.Tensor) -> None:
        """``loss.backward()``, such that the size of the batch rounds nothing.

        The mean over a batch of n divides the gradient of each example by n, and bfloat16 rounds
        the quotient to 8 bits, for n and n - 1 differently: one example then moves what the others
        add to the sum. Here nothing is divided by n, and clipping multiplies nothing by it. For
        ``grad_sample_mode="one_pass"``; what else the loss depends on gets gradients of the sum.

        Args:
            loss: of the batch, in float32: a mean over the examples, or a sum if
                ``loss_reduction`` says so.

        Raises:
            ValueError: the loss is in 16 bits, or the mode is one of Opacus's.
        """
        self._own_sums.backward(loss)

    def check_loss(self, loss: Callable[..., torch.Tensor], *batch: torch.Tensor) -> None:
        """Raise unless a loss is a mean over examples, or a sum, as ``loss_reduction`` says.

        Clipping bounds an example's share only if the loss adds up the losses of single examples.
        A mean over all tokens of a batch, for one, does not. ``step_function`` checks this itself.

        Args:
            loss: of the tensors of a batch: calls the model.
            batch: the tensors of some examples.

        Raises:
            ValueError: it is not, the mode is "ew", or there are fewer than two examples.
        """
        self._started.step.sums.check_loss(loss, batch)

    def audit(
        self,
        *,
        num_canaries: int = 50_000,
        delta: float | None = None,
        confidence: float = 0.999,
        seed: int = 0,
    ) -> Audit:
        """What canaries show about ε of this run's plan: a lower bound, beside the claim.

        It is a run of its own, with a dataset of canaries, a key of its own, and the plan, clip
        norm and device of this one; nothing of this run is touched. Each canary is an example with
        a gradient in a direction of its own, in or out by a fair coin. See ``corrnoise.auditing``.

        Args:
            num_canaries: the least number of them; the bound grows with its logarithm.
            delta: where ε is claimed and bounded; the plan's by default.
            confidence: the probability that the bound is below the engine's ε.
            seed: of coins, noise and batches.
        """
        run = self._started
        if self.secure_mode:
            raise ValueError(
                "audit must be called without secure_mode: so many canaries need "
                "grad_sample_mode='one_pass'; audit an engine of the same plan without it"
            )
        return audit(
            run.plan,
            make_engine=lambda key: type(self)(key=key),
            num_canaries=num_canaries,
            clip_norm=run.step.sums.clip_norm,
            delta=delta,
            confidence=confidence,
            seed=seed,
            device=run.step.sums.params[0].device,
        )

    @property
    def plan(self) -> Plan:
        """What the run was planned and priced as."""
        return self._started.plan

    @property
    def key(self) -> Key:
        """The secret of the run."""
        return self._started.key

    @property
    def steps_taken(self) -> int:
        """How many steps this process's model has taken."""
        return 0 if self._setup is None else self._setup.step.taken

    @property
    def steps_released(self) -> int:
        """How many steps were ever released under the run's key: those that the ledger knows.

        After a resume from an older checkpoint it is more than ``steps_taken``; ε counts these.
        """
        if self._setup is None:
            return 0
        return max(self._setup.step.taken, self._setup.step.ledger.num_released)

    def get_epsilon(self, delta: float) -> float:
        """ε of the steps released so far, from the plan's analysis; exact, bound or certified.

        Valid for a number of steps that was not chosen by looking at the results. It is the plan's
        ε for the whole run at the plan's δ. Any other price of balls-in-bins is a proven bound, at
        once, where a certificate would take seconds: ``plan.calibration.spent`` gives one.
        """
        if self._inherited:
            return math.inf
        return self._started.spent.epsilon(self.steps_released, delta)

    def statement(self, delta: float | None = None) -> Statement:
        """The privacy statement of what was released so far: ``to_text()``, ``to_json()``."""
        run = self._started
        delta = run.plan.delta if delta is None else delta
        taken, epsilon = self.steps_released, self.get_epsilon(delta)
        return statement(run, steps_taken=taken, epsilon=epsilon, delta=delta)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides model and optimizer: plain values and tensors, no key."""
        return resume.state(self._started, self._inherited)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken.

        Raises:
            ValueError: it belongs to another run, or the ledger does not know its steps.
        """
        resume.check(self._started, state)
        self._inherited = resume.restore(self._started, state)

    def publish(self) -> None:
        """Say that what is saved now is published, before ``state_dict()`` is saved by hand.

        ``save_checkpoint`` does so itself. It matters for ``publishes="checkpoints"``.
        """
        self._started.step.ledger.publish()

    def save_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Save model, optimizer and run, atomically, in the shape of Opacus's checkpoints.

        The key is not in it. The checkpoint before it stays as ``PATH.previous``.
        """
        if is_private(self.plan.calibration):
            _refuse_schedulers(noise_scheduler, grad_clip_scheduler)
        data = resume.contents(
            self._started,
            module.state_dict(**(module_state_dict_kwargs or {})),
            self.accountant.state_dict(),
            self._inherited,
            optimizer=optimizer,
            noise_scheduler=noise_scheduler,
            grad_clip_scheduler=grad_clip_scheduler,
        )
        if not self._warned:
            self._warned = True
            resume.warn_if_final(
                key_kept=self._key_source is not None, ledger_kept=self._ledger_path is not None
            )
        self._started.step.ledger.publish()
        checkpoint.save({**(checkpoint_dict or {}), **data}, path, **(torch_save_kwargs or {}))

    def load_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Continue a run: call it after ``make_private`` with the same arguments.

        A damaged file is refused, and the one before it is used, with a warning. Nothing is
        changed unless everything fits. The checkpoint of a run without noise can be loaded into
        any run: its weights are taken over, and ε is ∞ from then on.

        Returns:
            the checkpoint's dictionary.
        """
        data = checkpoint.load(path, **(torch_load_kwargs or {}))
        foreign = resume.without_noise(self._started, data)
        if not foreign:
            _refuse_schedulers(noise_scheduler, grad_clip_scheduler)
            resume.check_contents(self._started, data, path, with_optimizer=optimizer is not None)
        module.load_state_dict(data["module_state_dict"], **(module_load_dict_kwargs or {}))
        resume.load_states(
            data,
            optimizer=optimizer,
            noise_scheduler=noise_scheduler,
            grad_clip_scheduler=grad_clip_scheduler,
        )
        if foreign:
            self._inherited = resume.inherited(data)
        else:
            self._inherited = resume.restore(self._started, data["corrnoise"])
        return data

    def close(self) -> None:
        """End the run in this process: gives the ledger's lock back, and lets the model go.

        The model can then be trained further, without privacy or by another engine, with another
        optimizer; and pickled or traced.
        """
        if self._setup is not None:
            self._setup.step.ledger.close()
            self._setup.step.sums.close()
            owners.disown(self._setup.optimizer)

    def is_compatible(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> bool:
        """Whether Opacus can take gradients of single examples through the module."""
        return opacus.is_valid(module)

    def validate(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> None:
        """As ``is_compatible``, but raises with the reason, such as BatchNorm."""
        opacus.validate(module)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A copy of the module with the parts replaced that cannot be private."""
        return opacus.compatible(module)

    # What follows serves the methods above.

    def _history(self) -> list[Entry]:
        found = list(self._inherited)
        if self.steps_released:
            rate = float(self.plan.sampling.rate(self.plan.participation))
            found.append((self.plan.noise_multiplier, rate, self.steps_released))
        return found

    @property
    def _own_sums(self) -> OnePassSums:
        sums = self._started.step.sums
        if not isinstance(sums, OnePassSums):
            raise ValueError(
                "grad_sample_mode must be 'one_pass' for this, got one of Opacus's modes; name it "
                "in make_private to see why it was not taken"
            )
        return sums

    @property
    def _started(self) -> Setup:
        if self._setup is None:
            raise ValueError("make_private must come first: there is no run yet")
        return self._setup

    def _admitted(
        self,
        options: Options,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        processes: Processes,
    ) -> Options:
        """The options with the mode decided; what no plan could change is refused first."""
        if self._setup is not None:
            raise ValueError(
                "make_private must be called once for each engine: a key belongs to one run; "
                "make another PrivacyEngine"
            )
        options = chosen_mode(options, module, processes)
        requirements.check(module, accelerated.unwrapped(optimizer), processes, options)
        return options

    def _begin(
        self,
        plan: Plan,
        processes: Processes,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        options: Options,
    ) -> Any:
        """Start the run of a plan that fits the loader."""
        inner = accelerated.unwrapped(optimizer)
        if options.noise_generator is not None and not plan.mechanism.independent:
            raise ValueError(
                f"noise_generator must be left out for {plan.mechanism!r}: past draws of a torch "
                "generator cannot be regenerated; it is for mechanism='dp_sgd'"
            )
        self._setup, found = set_up(
            plan,
            processes,
            module=module,
            optimizer=inner,
            data_loader=data_loader,
            shuffled=check_loader(data_loader),
            data_fingerprint=self._data_fingerprint,
            settings=self._settings,
            publishes=self._publishes,
            key=self._key_source,
            ledger=self._ledger_path,
            options=options,
        )
        return accelerated.rewrapped(found, inner, optimizer)

    def _request(
        self,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        epochs: int | None,
        mechanism: Any,
        num_bands: Any,
        sampling: Any,
        poisson_sampling: bool,
    ) -> Request:
        check_loader(loader)
        return Request(
            optimizer=optimizer,
            num_examples=num_examples(loader),
            batch_size=batch_size(loader),
            min_sep=len(loader),
            epochs=epochs,
            mechanism=mechanism,
            num_bands=num_bands,
            sampling=sampling,
            poisson_sampling=poisson_sampling,
            workload=self._workload,
            memory=self._memory,
            rounds=self._rounds,
            progress=self._progress,
        )


def _refuse_schedulers(noise_scheduler: object, grad_clip_scheduler: object) -> None:
    """Raise if either was given."""
    if noise_scheduler is not None or grad_clip_scheduler is not None:
        raise ValueError(
            "noise and clip schedulers must be left out: the plan has one noise level and one "
            "clip norm for all steps"
        )
