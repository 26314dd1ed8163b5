"""Audits of an engine: canaries go through its batches, clipping, noise and filter.

The dataset of an audit has only canaries. The model is one row of weights. The gradient of canary i
is a multiple of direction i and longer than the clip norm, so that it is clipped. A canary that is
out has the gradient 0, as an empty example has. Everything else is as in a run of the plan:
``PrivacyEngine.make_private`` with the plan's calibration, its loader and its steps. The gradients
that the optimizer gets are the released outputs.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from corrnoise import _checks as checks
from corrnoise._progress import Progress, Share, resolve
from corrnoise.auditing import Audit, Canaries, judge
from corrnoise.noise import Key
from corrnoise.planning import Plan
from corrnoise.planning.verification import trust
from corrnoise.records import keys
from corrnoise.samplings import account

Row = tuple[torch.Tensor, torch.Tensor]

# The norm of a canary's gradient before clipping, over the clip norm.
_LENGTH = 4.0
# Steps times canaries: what is kept in memory, in float32.
_MOST_OUTPUTS = 1 << 31
_MOST_STEPS = 4096
# The parts of a bar, about as long as they take: an ε of the plan, the run, and the bound at one δ.
_PRICING, _CANARIES, _JUDGING = 5, 1000, 100


def audit(
    plan: Plan,
    *,
    make_engine: Any,
    num_canaries: int = 50_000,
    clip_norm: float = 1.0,
    delta: float | None = None,
    confidence: float = 0.999,
    seed: int = 0,
    device: str | torch.device = "cpu",
    progress: Progress | bool | None = None,
) -> Audit:
    """A lower bound on the ε of the engine, beside what the plan claims; see ``judge``.

    Args:
        plan: the claim. Only its calibration is used, as the dataset has only canaries.
        make_engine: a function from a key to a ``PrivacyEngine``.
        num_canaries: the least number of canaries; the bound grows with its logarithm.
        clip_norm: C, the clip norm.
        delta: the δ of claim and bound; the plan's by default.
        confidence: the probability that the bound is at most the engine's ε.
        seed: the seed of coins, noise and batches; an audit has no secret.
        device: the device of the model.
        progress: called with (parts done, parts in all); True for a bar on the terminal.
    """
    (found,) = audits(
        plan,
        (plan.delta if delta is None else delta,),
        make_engine=make_engine,
        num_canaries=num_canaries,
        clip_norm=clip_norm,
        confidence=confidence,
        seed=seed,
        device=device,
        progress=progress,
    )
    return found


def audits(
    plan: Plan,
    deltas: Sequence[float],
    *,
    make_engine: Any,
    num_canaries: int = 50_000,
    clip_norm: float = 1.0,
    confidence: float = 0.999,
    seed: int = 0,
    device: str | torch.device = "cpu",
    progress: Progress | bool | None = None,
) -> list[Audit]:
    """``audit`` for several δ with one run of canaries; each bound has the confidence by itself."""
    share = Share(resolve(progress), _PRICING + _CANARIES + (_PRICING + _JUDGING) * len(deltas))
    c = plan.verified(share.part(_PRICING)).calibration
    share.advance(_PRICING)
    claims: list[float] = []
    for delta in deltas:
        claims.append(
            c.epsilon
            if delta == c.delta
            else account(
                c.mechanism,
                c.participation,
                noise_multiplier=c.noise_multiplier,
                delta=delta,
                sampling=c.sampling,
                progress=share.part(_PRICING),
            ).epsilon
        )
        share.advance(_PRICING)
    released = run_canaries(
        plan,
        make_engine,
        num_canaries=num_canaries,
        clip_norm=clip_norm,
        seed=seed,
        device=device,
        progress=share.part(_CANARIES),
    )
    share.advance(_CANARIES)
    found: list[Audit] = []
    for claim, delta in zip(claims, deltas, strict=True):
        found.append(judge(c, released, claim=claim, delta=delta, confidence=confidence, seed=seed))
        share.advance(_JUDGING)
    return found


def run_canaries(
    plan: Plan,
    make_engine: Any,
    *,
    num_canaries: int,
    clip_norm: float = 1.0,
    seed: int = 0,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> Canaries:
    """Train on canaries as the plan says, and return the released outputs.

    ``progress`` is called after each step with (steps taken, steps in all).
    """
    n, b = plan.num_steps, plan.participation.min_sep
    checks.integer("num_steps of an audited plan", n, 1, _MOST_STEPS, "audit a shorter plan")
    wanted = checks.integer("num_canaries", num_canaries, 100)
    checks.integer("num_canaries times num_steps", wanted * n, 100, _MOST_OUTPUTS)
    m = -(-wanted // b) * b
    # Where everyone knows the batch of an example, all canaries are in the first: a run that ends
    # cuts the columns of C of later ones.
    size = m if plan.sampling.secret else m * b
    own = dataclasses.replace(plan, num_examples=size, batch_size=size // b)
    trust(own)  # its calibration is that of the verified plan
    key = Key.from_bytes(hashlib.sha256(f"corrnoise audit {seed}".encode()).digest())
    places = np.arange(size) if plan.sampling.secret else own.batches(key).indices(0)
    present = np.random.default_rng([seed, 1]).random(m) < 0.5
    index = torch.zeros(size, dtype=torch.long)
    index[places] = torch.arange(m)
    length = torch.zeros(size)
    length[places] = torch.from_numpy(np.where(present, _LENGTH * clip_norm, 0.0)).float()
    net = nn.Embedding(m, 1).to(device)
    nn.init.zeros_(net.weight)
    engine = make_engine(key)
    net, optimizer, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        data_loader=DataLoader(
            _Rows(index.to(device), length.to(device)), batch_size=size // b, collate_fn=_whole
        ),
        max_grad_norm=clip_norm,
        plan=own,
    )
    outputs = np.zeros((n, m), dtype=np.float32)
    taken = np.zeros((n, m), dtype=bool)
    place_of = np.full(size, -1)
    place_of[places] = np.arange(m)
    batches = own.batches(key)
    step = 0
    try:
        while step < n:
            for rows, lengths in loader:
                optimizer.zero_grad()
                (net(rows)[:, 0] * lengths).mean().backward()
                optimizer.step()
                grad = net.weight.grad
                assert grad is not None
                outputs[step] = grad.detach()[:, 0].cpu().numpy() * (own.divisor / clip_norm)
                here = place_of[batches.indices(step)]
                taken[step, here[here >= 0]] = True
                step += 1
                if progress is not None:
                    progress(step, n)
                if step == n:
                    break
    finally:
        engine.close()
        # The key of an audit protects nothing, and the same seed may be asked for again.
        keys.forget(key)
    return Canaries(outputs, taken, present)


class _Rows(Dataset[Row]):
    """The direction and the length of each example's gradient; a whole batch is fetched at once."""

    def __init__(self, index: torch.Tensor, length: torch.Tensor) -> None:
        self.index, self.length = index, length

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, place: int) -> Row:
        return self.index[place], self.length[place]

    def __getitems__(self, places: list[int]) -> Row:
        chosen = torch.tensor(places, dtype=torch.long, device=self.index.device)
        return self.index[chosen], self.length[chosen]


def _whole(batch: Any) -> Any:
    return batch
