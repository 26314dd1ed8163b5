"""A small model, a small dataset, and the loop that every user writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from corrnoise.noise import Key
from corrnoise.records import keys

KEY = Key.from_bytes(bytes(range(32)))


def dataset(size: int = 60, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 12, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def model(seed: int = 2, *, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Dropout(dropout), nn.Linear(9, 2))


def loader(size: int = 60, batch_size: int = 10, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(size), batch_size=batch_size, **options)


def private(engine: Any, *, net: nn.Module | None = None, **options: Any) -> Any:
    """``make_private`` with usual arguments; any of them can be replaced."""
    keys._RELEASED.clear()  # tests repeat runs with one key on purpose
    net = model() if net is None else net
    given: dict[str, Any] = {
        "module": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        "data_loader": loader(),
        "max_grad_norm": 1.0,
        **options,
    }
    if "plan" not in given and "target_epsilon" not in given:
        given = {"noise_multiplier": 1.0, "epochs": 3, "sampling": "fixed", **given}
    if "target_epsilon" in given:
        return engine.make_private_with_epsilon(**given)
    return engine.make_private(**given)


def same_noise(monkeypatch: Any) -> None:
    """Whoever makes a new key gets ``KEY``, so that no test of accuracy fails by bad luck."""
    keys._RELEASED.clear()
    monkeypatch.setattr(Key, "generate", staticmethod(lambda: KEY))


def train(
    net: Any,
    optimizer: Any,
    batches: Any,
    *,
    steps: int,
    criterion: Any = None,
    after: Any = None,
) -> list[float]:
    """Epoch after epoch until ``steps`` batches were seen."""
    criterion = criterion or nn.CrossEntropyLoss()
    losses: list[float] = []
    while len(losses) < steps:
        for x, y in batches:
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.item()))
            if after is not None:
                after(len(losses))
            if len(losses) == steps:
                break
    return losses


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in net.parameters()])
