"""Random augmentation in loader workers repeats, whoever reads an example and when."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, default_collate, get_worker_info
from training import KEY, dataset, model, private, train, weights

from corrnoise.noise import Key
from corrnoise.torch import PrivacyEngine
from corrnoise.torch.augmentation import Augmented, Order


class Noisy(Dataset):
    """Draws from every generator, and a number of times that depends on the example."""

    def __init__(self):
        self.data = dataset()

    def __len__(self):
        return 60

    def __getitem__(self, index):
        x, y = self.data[index]
        x = x + torch.randn(12 + index % 3)[:12] + random.gauss(0.0, 1.0)
        return (x + torch.from_numpy(np.random.normal(size=12))).float(), y  # noqa: NPY002


class NoisyBatches(Noisy):
    """As datasets that read a whole batch at once do."""

    def __getitems__(self, indices):
        shift = torch.randn(12)
        return [
            (self.data[i][0] + shift + random.gauss(0.0, 1.0), self.data[i][1]) for i in indices
        ]


def noisy_collate(examples):
    x, y = default_collate(examples)
    return x + torch.randn_like(x), y


def start(folder=None, *, key=KEY, data=None, **options):
    files = {} if folder is None else {"ledger": folder / "run.ledger"}
    engine = PrivacyEngine(key=key if folder is None else folder / "noise.key", **files)
    net = model()
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    data_loader = DataLoader(data or Noisy(), batch_size=10, **{"num_workers": 2, **options})
    return engine, *private(engine, net=net, data_loader=data_loader)


def inputs(run, steps, physical=None):
    """The inputs of each step, as the loop gets them."""
    engine, net, optimizer, batches = run
    found = {}
    while engine.steps_taken < steps:
        managed = BatchMemoryManager(
            data_loader=batches, max_physical_batch_size=physical or 60, optimizer=optimizer
        )
        with managed as parts:
            for x, y in parts:
                found.setdefault(engine.steps_taken, []).append(x)
                optimizer.zero_grad()
                nn.CrossEntropyLoss()(net(x), y).backward()
                optimizer.step()
                if engine.steps_taken == steps:
                    break
    return {step: torch.cat(parts) for step, parts in found.items()}


@pytest.mark.parametrize(("data", "workers"), [(Noisy, 0), (Noisy, 2), (NoisyBatches, 2)])
def test_a_run_that_resumes_in_mid_epoch_repeats_its_augmentation(tmp_path, data, workers):
    options = {"data": data(), "collate_fn": noisy_collate, "num_workers": workers}
    engine, net, optimizer, batches = start(tmp_path, **options)
    train(net, optimizer, batches, steps=9)
    engine.save_checkpoint(path=tmp_path / "c", module=net, optimizer=optimizer)
    train(net, optimizer, batches, steps=2)  # released: the resumed run must repeat them
    engine.close()
    engine, net, optimizer, batches = start(tmp_path, **options, persistent_workers=workers > 0)
    engine.load_checkpoint(path=tmp_path / "c", module=net, optimizer=optimizer)
    train(net, optimizer, batches, steps=9)
    resumed = weights(net)
    engine.close()
    _, net, optimizer, batches = start(key=engine.key, **options)
    train(net, optimizer, batches, steps=18)
    assert torch.equal(resumed, weights(net))


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
        {"data": Subset(Noisy(), range(60))},
    ],
)
def test_augmentation_does_not_depend_on_workers_or_physical_batches(options):
    expected = inputs(start(num_workers=1), 13)
    found = inputs(start(**options), 13, physical=4)
    assert found.keys() == expected.keys() == set(range(13))
    assert all(torch.equal(found[step], expected[step]) for step in expected)


def test_each_step_example_and_key_has_its_own_augmentation():
    data = Noisy()
    data.data.tensors[0].zero_()
    found = inputs(start(data=data), 12)
    rows = torch.cat([*found.values(), inputs(start(key=Key.generate(), data=data), 1)[0]])
    assert len(torch.unique(rows, dim=0)) == 130  # steps 6 to 11 read what steps 0 to 5 read


def test_a_worker_starts_with_the_users_function_and_dataset():
    class Shifted(Noisy):
        shift = 0.0

        def __getitem__(self, index):
            x, y = self.data[index]
            return x + self.shift, y

    def begin(worker_id):
        assert get_worker_info().id == worker_id
        get_worker_info().dataset.shift = 5.0

    found = inputs(start(data=Shifted(), worker_init_fn=begin), 1)
    assert torch.equal(found[0], dataset().tensors[0][:10] + 5.0)


def test_a_dataset_reaches_workers_that_are_spawned():
    data = pickle.loads(pickle.dumps(Augmented(Noisy(), bytes(32))))
    order = pickle.loads(pickle.dumps(Order(3, [4, 5])))
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    first = [x for x, _ in data.__getitems__(order)]
    again = [x for x, _ in Augmented(Noisy(), bytes(32)).__getitems__(Order(3, [5]))]
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])  # noqa: NPY002
    assert torch.equal(first[1], again[0])
    assert not torch.equal(first[0], first[1])
