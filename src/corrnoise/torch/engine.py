"""A privacy engine with Opacus's interface and correlated noise."""

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
from corrnoise.torch import accelerated, checkpoint, opacus, requirements, resume
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
    """A drop-in replacement for ``opacus.PrivacyEngine`` with correlated noise.

    Clipping is done in one backward pass, or by any of Opacus's modes. Four things differ from
    Opacus: the noise is correlated across steps and comes from a cryptographic stream; the batches
    are those of the plan; ε comes from the plan's own analysis; checkpoints resume exactly.

    Guarantees: a step is released only after it was checked against the plan and, with a ledger,
    recorded. The privacy of the run is that of the plan (exact, bound or certified); it depends on
    neither the optimizer nor the model. ``statement()`` and docs/guarantee.md have the assumptions.

    Cost: by default the noise of a C⁻¹ of p bands takes no memory, and p draws for each parameter
    and step (``CorrelatedNoise``).

    Args:
        accountant: accepted for compatibility with Opacus, with a warning: ε comes from the plan.
        secure_mode: compute sums of clipped gradients and releases without rounding errors. Then
            each release is a correctly rounded value of the continuous mechanism, and the guarantee
            does not assume exact arithmetic. It is slower. It needs one process, a mode that stores
            per-example gradients ("hooks", which "auto" then means) and a banded C⁻¹. The noise is
            cryptographic with and without it.
        key: the secret of the noise and the batches: a ``Key``, or the path of a key file (mode
            0600, created if it does not exist; keep it apart from checkpoints). By default a fresh
            key from the operating system, which is lost when the process ends.
        ledger: the path of the ledger of released steps. With a ledger and a key file, a run can be
            resumed.
        memory: how many model-sized vectors the noise may store to save time; see
            ``CorrelatedNoise``. A ``plan`` given to ``make_private`` has its own value.
        rounds: the number of ChaCha rounds; a ``plan`` has its own value, too.
        workload: the workload that the noise is chosen for; read from the optimizer by default.
        delta: the δ of ε if ``make_private`` gets a noise multiplier; by default 1/(10·number of
            examples).
        data_fingerprint: a name for the dataset, instead of a digest of some examples.
        progress: as in ``calibrate``.
        settings: plain values that must not change until the end of the run, such as the learning
            rate; a resume with other values is refused.
        publishes: what leaves the process. With "steps", the default, every step counts as released
            when it is taken. A resumed run must then repeat steps bit for bit, which fails on a GPU
            whose kernels add in a varying order. With "checkpoints" only checkpoints by
            ``save_checkpoint``, and metrics computed from them, are published. Then the steps after
            the last checkpoint of a crashed run may be repeated with other rounding. Publishing
            logs, metrics or weights of such lost steps would break the guarantee.

    >>> import torch, corrnoise.torch
    >>> model = torch.nn.Linear(4, 2)
    >>> data = torch.utils.data.TensorDataset(torch.randn(60, 4), torch.randint(2, (60,)))
    >>> engine = corrnoise.torch.PrivacyEngine()
    >>> model, optimizer, loader = engine.make_private_with_epsilon(
    ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    ...     data_loader=torch.utils.data.DataLoader(data, batch_size=20), epochs=2,
    ...     target_epsilon=8.0, target_delta=1e-4, max_grad_norm=1.0, sampling="fixed")
    >>> for x, y in loader:
    ...     optimizer.zero_grad()
    ...     torch.nn.functional.cross_entropy(model(x), y).backward()
    ...     optimizer.step()
    >>> engine.steps_taken, 0.0 < engine.get_epsilon(1e-4) < 8.0
    (3, True)
    >>> engine.close()
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
        """Start a private run, as ``opacus.PrivacyEngine.make_private``, with the noise of a plan.

        Give either ``plan``, or ``noise_multiplier`` and ``epochs``.

        Args:
            module: the model; with several processes, wrapped for DDP or by ``fully_shard``.
            optimizer: any optimizer of torch; its momentum and decay determine the workload.
            data_loader: gives the dataset and the number of batches in an epoch; its sampler is
                replaced.
            max_grad_norm: the clip norm; a list of clip norms for ``clipping="per_layer"``.
            noise_multiplier: the standard deviation of z over the clip norm. 0 is for debugging:
                there is no noise, the run is not private, and ε is ∞.
            epochs: the number of epochs that the run is planned for.
            mechanism: a name ("bisr" by default) or a ``Mechanism``.
            num_bands: p of a mechanism given by name, or the buffers of "blt"; by default 4, and b
                for "bsr" and "band_mf".
            sampling: as in ``calibrate``; by default "fixed" if not ``poisson_sampling``, else
                "poisson" for dp_sgd and "balls-in-bins" for the others.
            plan: a ``Plan``, from ``corrnoise.plan`` or a file, in place of the arguments above.
            criterion: the loss, for the ghost modes; cross entropy by default.
            batch_first: as in Opacus.
            loss_reduction: as in Opacus; with "mean", sums of gradients are divided by the plan's
                divisor.
            poisson_sampling: ``False`` means ``sampling="fixed"``.
            clipping: "flat" or "per_layer".
            noise_generator: use Opacus's normals from this generator instead of the cryptographic
                stream; only for dp_sgd, for comparisons.
            grad_sample_mode: how gradients are clipped. "one_pass" needs one backward pass and
                changes neither model nor optimizer. "hooks", "functorch" and "ew" are Opacus's.
                "ghost" and "ghost_fsdp" are our own too, with a criterion as in Opacus. "auto" is
                "one_pass" for every model that allows it, else "hooks".
            wrap_model: as in Opacus.
            rand_on_empty: deliver an empty batch as one random example whose gradient is replaced
                by zeros, for modes that cannot run on an empty batch, such as "ew".
            max_physical_batch_size: the most examples that the loader delivers at once, for
                "one_pass". A larger batch comes in pieces, and the optimizer steps after the last.
            views: how often the loader reads each example of a batch, for random augmentation with
                "one_pass". The rows of an example follow each other, and the mean of their
                gradients is clipped. It costs no privacy.
            unknown: other arguments, such as those of adaptive clipping, are refused with the
                reason.

        Returns:
            (module, optimizer, data loader), with the criterion before the loader in the ghost
            modes. With "one_pass" module and optimizer are the same objects as before.

        Raises:
            ValueError: the plan does not cover the request; the message has reason and remedy.
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
        """``make_private`` with the least noise for a budget: ε never exceeds ``target_epsilon``.

        Arguments without a description here are those of ``make_private``.

        Args:
            module: the model.
            optimizer: any optimizer of torch.
            data_loader: gives the dataset and the number of batches in an epoch.
            target_epsilon: ε of the whole run.
            target_delta: δ of the whole run.
            epochs: the number of epochs.
            max_grad_norm: the clip norm.
            mechanism: a name, a ``Mechanism``, or "best" to let the planner choose.
            num_bands: as in ``make_private``.
            sampling: as in ``make_private``.
            criterion: as in ``make_private``.
            batch_first: as in ``make_private``.
            loss_reduction: as in ``make_private``.
            poisson_sampling: as in ``make_private``.
            clipping: as in ``make_private``.
            noise_generator: as in ``make_private``.
            grad_sample_mode: as in ``make_private``.
            wrap_model: as in ``make_private``.
            rand_on_empty: as in ``make_private``.
            max_physical_batch_size: as in ``make_private``.
            views: as in ``make_private``.
            epsilon_tolerance: accepted for compatibility with Opacus, and not used: the noise is
                the least for the budget up to rounding.
            unknown: as in ``make_private``.
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
        """A whole training step as a function of a batch, for models limited by kernel launches.

        On a GPU forward, backward and clipping run as a CUDA graph of fixed size. A batch is padded
        to ``size`` rows with copies of weight zero; a larger batch comes in pieces.

        Args:
            loss: a function of the tensors of a batch that calls the model and returns the mean
                over the examples (or the sum, as ``loss_reduction`` says).
            size: the rows of the graph. By default a random batch is larger with probability 1e-6,
                and it is at most ``max_physical_batch_size``.

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
        """``loss.backward()`` without rounding errors that depend on the size of the batch.

        The mean over a batch of n divides the gradient of each example by n, and bfloat16 rounds
        the quotient to 8 bits, differently for n and n - 1. So the presence of one example changes
        what the others add to the sum. This method avoids the division by n, and the multiplication
        by n when gradients are clipped. It is for ``grad_sample_mode="one_pass"``. Tensors outside
        the model that the loss depends on get the gradients of the sum.

        Args:
            loss: the loss of the batch, in float32: a mean over the examples, or a sum if
                ``loss_reduction`` says so.

        Raises:
            ValueError: the loss is in 16 bits, or the mode is one of Opacus's.
        """
        self._own_sums.backward(loss)

    def check_loss(self, loss: Callable[..., torch.Tensor], *batch: torch.Tensor) -> None:
        """Raise unless a loss is a mean over examples, or a sum, as ``loss_reduction`` says.

        Clipping bounds the influence of an example only if the loss adds up the losses of single
        examples. A mean over all tokens of a batch does not, for instance. ``step_function`` makes
        this check itself.

        Args:
            loss: a function of the tensors of a batch that calls the model and returns the loss.
            batch: the tensors of some examples.

        Raises:
            ValueError: the loss mixes examples, the mode is "ew", or there are fewer than two
                examples.
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
        """Audit the engine with canaries: a lower bound on ε, beside the claim of this run's plan.

        The audit is a separate run with a dataset of canaries, its own key, and the plan, clip norm
        and device of this run, which it does not change. Each canary is an example whose gradient
        has a direction of its own, and which is in or out by a fair coin. See
        ``corrnoise.auditing``.

        Args:
            num_canaries: the least number of canaries; the bound grows with its logarithm.
            delta: the δ of claim and bound; the plan's by default.
            confidence: the probability that the bound is at most the engine's ε.
            seed: the seed of coins, noise and batches.
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
        """The plan of the run."""
        return self._started.plan

    @property
    def key(self) -> Key:
        """The secret key of the run."""
        return self._started.key

    @property
    def steps_taken(self) -> int:
        """How many steps the model of this process has taken."""
        return 0 if self._setup is None else self._setup.step.taken

    @property
    def steps_released(self) -> int:
        """How many steps were released under the run's key, according to the ledger.

        After a resume from an older checkpoint this is more than ``steps_taken``. ε is for these
        steps.
        """
        if self._setup is None:
            return 0
        return max(self._setup.step.taken, self._setup.step.ledger.num_released)

    def get_epsilon(self, delta: float) -> float:
        """ε of the steps released so far at ``delta``: exact, a proven bound or certified.

        It is valid if the number of steps was not chosen by looking at the results. For the whole
        run at the plan's δ it is the plan's ε. For fewer steps or another δ with balls-in-bins it
        is a proven bound, as a certificate would take seconds; ``plan.calibration.spent`` computes
        certificates for fewer steps.
        """
        if self._inherited:
            return math.inf
        return self._started.spent.epsilon(self.steps_released, delta)

    def statement(self, delta: float | None = None) -> Statement:
        """The privacy statement of the released steps; it has ``to_text()`` and ``to_json()``."""
        run = self._started
        delta = run.plan.delta if delta is None else delta
        taken, epsilon = self.steps_released, self.get_epsilon(delta)
        return statement(run, steps_taken=taken, epsilon=epsilon, delta=delta)

    def state_dict(self) -> dict[str, Any]:
        """The engine's part of a checkpoint: plain values and tensors, without the key."""
        return resume.state(self._started, self._inherited)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken.

        Raises:
            ValueError: it belongs to another run, or the ledger does not know its steps.
        """
        resume.check(self._started, state)
        self._inherited = resume.restore(self._started, state)

    def publish(self) -> None:
        """Record a publication; call it before saving ``state_dict()`` by hand.

        ``save_checkpoint`` calls it. It is needed only with ``publishes="checkpoints"``.
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
        """Save model, optimizer and run atomically, in the format of Opacus's checkpoints.

        The file does not have the key. The previous checkpoint is kept as ``PATH.previous``.
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
        """Resume a run: call this after ``make_private`` with the same arguments.

        If the file is damaged, the previous checkpoint is used, with a warning. Nothing is changed
        unless the checkpoint belongs to the run. The checkpoint of a run without noise can be
        loaded into any run: its weights are used, and ε is ∞ from then on.

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
        """End the run in this process: release the ledger's lock, and detach from the model.

        The model can then be trained with another optimizer, without privacy or by another engine,
        and it can be pickled or traced.
        """
        if self._setup is not None:
            self._setup.close()

    def is_compatible(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> bool:
        """Whether Opacus can compute per-example gradients of the module."""
        return opacus.is_valid(module)

    def validate(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> None:
        """As ``is_compatible``, but raises an error with the reason, such as BatchNorm."""
        opacus.validate(module)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A copy of the module in which layers that cannot be trained privately are replaced."""
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
