"""The workload that is read from an optimizer is what the optimizer does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from corrnoise.torch import workload_of

N = 40


def response(make):
    """The weights after each step when the first gradient is 1 and the others are 0."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = make([weight])
    found = []
    for step in range(N):
        weight.grad = torch.tensor([1.0 if step == 0 else 0.0], dtype=torch.float64)
        optimizer.step()
        found.append(-weight.item())
    return np.array(found)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("shrink", [0.0, 0.01, 0.5, 3.0])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_exact(momentum, shrink, nesterov):
    if nesterov and momentum == 0.0:
        pytest.skip("torch has no Nesterov without momentum")

    def make(params):
        return torch.optim.SGD(
            params, lr=0.2, momentum=momentum, weight_decay=shrink, nesterov=nesterov
        )

    found = response(make)
    workload = workload_of(make([torch.nn.Parameter(torch.zeros(1))]), N)
    assert np.allclose(workload.coef, found / found[0], rtol=1e-9, atol=1e-12)


def test_small_decay_is_sgd_with_decay_and_momentum():
    weight = [torch.nn.Parameter(torch.zeros(1))]
    workload = workload_of(torch.optim.SGD(weight, lr=0.1, momentum=0.9, weight_decay=1e-3), N)
    assert workload.decay == pytest.approx(1 - 1e-4 / 0.1, rel=1e-4)
    assert workload.momentum == pytest.approx(0.9, rel=1e-2)


def test_adam_is_taken_by_its_first_beta_and_others_as_sums():
    weight = [torch.nn.Parameter(torch.zeros(1))]
    adam = workload_of(torch.optim.Adam(weight, lr=0.1, betas=(0.8, 0.99), weight_decay=0.1), N)
    assert (adam.momentum, adam.decay) == (0.8, 1.0)
    adamw = workload_of(torch.optim.AdamW(weight, lr=0.1, betas=(0.8, 0.99), weight_decay=0.1), N)
    assert (adamw.momentum, adamw.decay) == (0.8, pytest.approx(0.99))
    other = workload_of(torch.optim.Adagrad(weight, lr=0.1), N)
    assert (other.momentum, other.decay) == (0.0, 1.0)
