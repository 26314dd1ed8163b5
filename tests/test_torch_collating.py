"""Collate functions of runs: empty batches are like others, and rows keep their order."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate
from training import private, train

from corrnoise.noise import Key
from corrnoise.torch import PrivacyEngine
from corrnoise.torch.collating import collate


class Pair(NamedTuple):
    x: Any
    y: Any


CLASS, ONES = np.int64(1), torch.ones(1, 2)
# What a dataset gives for an example, and its empty batch.
EMPTY = {
    "tensors": ((torch.ones(3), torch.tensor(1)), [torch.ones(0, 3), torch.ones(0).long()]),
    "numpy": ((np.ones(3, np.float32), CLASS), [torch.ones(0, 3), torch.ones(0).long()]),
    "numbers": ((1, 2.0, True), [torch.ones(0).long(), torch.ones(0).double(), ONES[:0, 0].bool()]),
    "text": ((torch.ones(3), "secret"), [torch.ones(0, 3), []]),
    "nested": (((torch.ones(2), torch.ones(1)),), [[torch.ones(0, 2), torch.ones(0, 1)]]),
    "half": ((torch.ones(3).half(), 1), [torch.ones(0, 3).half(), torch.ones(0).long()]),
    "named": (Pair(torch.ones(3), 1), Pair(torch.ones(0, 3), torch.ones(0).long())),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_an_empty_batch_has_the_structure_types_and_shapes_of_others(kind):
    example, wanted = EMPTY[kind]
    loader = DataLoader([example] * 4, batch_size=2)
    found = collate(loader, batch_first=True, rand_on_empty=False)([])
    assert type(found) is type(wanted)
    torch.testing.assert_close(found, wanted)
    assert "secret" not in repr(found)


def test_an_empty_batch_has_no_rows_in_the_dimension_of_examples():
    loader = DataLoader([(torch.ones(5, 3), 1)] * 4, batch_size=2, collate_fn=columns)
    x, y, length = collate(loader, batch_first=False, rand_on_empty=False)([])
    assert (x.shape, y.shape, length) == ((5, 0, 3), (1, 0), 0)
    x, y, _ = collate(loader, batch_first=False, rand_on_empty=True)([])
    assert (x.shape, y.shape) == ((5, 1, 3), (1, 1))
    assert not x.any()


def columns(rows):
    xs, ys = zip(*rows, strict=True)
    return torch.stack(xs, 1), torch.tensor([ys]), len(xs[0])


def test_numpy_examples_train_with_an_empty_first_batch():
    few = [(np.ones(12, np.float32), np.int64(i % 2)) for i in range(2)]
    for number in range(1, 8):  # two of these seven begin with an empty batch
        engine = PrivacyEngine(key=Key.from_bytes(bytes([number]) * 32))
        net, optimizer, batches = private(
            engine,
            data_loader=DataLoader(few, batch_size=1),
            sampling="balls-in-bins",
            epochs=2,
        )
        train(net, optimizer, batches, steps=4)
        assert engine.steps_taken == 4


def sorted_rows(rows):
    """As for ``pack_padded_sequence``."""
    return default_collate(sorted(rows, key=lambda row: -row[1]))


def shuffled_rows(rows):
    """What draws cannot be told from what it draws."""
    return default_collate([(x + torch.rand(()), y) for x, y in rows])


@pytest.mark.parametrize("size", [1, 3])
def test_a_collate_function_that_sorts_is_refused_with_several_views(size):
    data = [(torch.full((3,), float(i)), i) for i in range(8)]
    for views in (1, 2):
        made = collate(
            DataLoader(data, batch_size=4, collate_fn=sorted_rows),
            batch_first=True,
            rand_on_empty=False,
            views=views,
        )
        rows = [data[i] for i in range(size) for _ in range(views)]
        if views == 1 or size == 1:
            made(rows)
        else:
            with pytest.raises(ValueError, match="must keep the order of its rows"):
                made(rows)


@pytest.mark.parametrize("function", [default_collate, shuffled_rows])
def test_other_collate_functions_keep_the_order_and_draw_the_same(function):
    data = [(torch.full((3,), math.nan if i == 1 else float(i)), i) for i in range(8)]
    loader = DataLoader(data, batch_size=4, collate_fn=function)
    made = collate(loader, batch_first=True, rand_on_empty=False, views=2)
    torch.manual_seed(0)
    found = [made([data[i]] * 2 + [data[i + 1]] * 2) for i in range(5)]
    torch.manual_seed(0)
    wanted = [function([data[i]] * 2 + [data[i + 1]] * 2) for i in range(5)]
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0, equal_nan=True)
