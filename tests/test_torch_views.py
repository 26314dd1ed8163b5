"""Several views of an example: gradients are averaged, then clipped, as the definition says."""

from __future__ import annotations

import pytest
import torch
from test_torch_clipping import MODELS, norm, value
from torch import nn
from torch.utils.data import DataLoader, Dataset
from training import KEY, dataset, loader, model, private, weights

from corrnoise.torch import PrivacyEngine
from corrnoise.torch.clipping.clipper import Clipper
from corrnoise.torch.clipping.convolution import Convolution
from corrnoise.torch.clipping.parts import Factors, Outer, Part
from corrnoise.torch.clipping.reference import clipped_sums
from corrnoise.torch.clipping.views import grouped

K = 3


def views_of(x):
    """K rows for each row of x, one after the other, all of them different."""
    rows = x.repeat_interleave(K, 0)
    if x.is_floating_point():
        return rows + 0.5 * torch.randn_like(rows)
    return (rows + torch.randint(0, 3, rows.shape)) % 11


def compare(net, x, *, mean, size):
    """The sums of one backward pass, beside those of the loop over examples; half are clipped."""
    params = [p for p in net.parameters() if p.requires_grad]
    count = len(x) // K

    def loss(i):
        return value(net(x[i * K : (i + 1) * K])).mean()

    each = [norm(clipped_sums(lambda _, i=i: loss(i), params, 1, 1e9)) for i in range(count)]
    clip = sorted(each)[count // 2]
    wanted = clipped_sums(loss, params, count, clip)
    clipper = Clipper(net, params, clip, mean=mean, views=K)
    for start in range(0, count, size):
        found = value(net(x[start * K : (start + size) * K]))
        (found.mean() if mean else found.sum()).backward()
    got = [g.clone() for g in clipper.sums()]
    assert clipper.examples == count
    clipper.recorder.close()
    return wanted, got


@pytest.mark.usefixtures("all_digits")
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_the_loop_over_examples(name):
    torch.manual_seed(0)
    net, x = MODELS[name]()
    wanted, got = compare(net, views_of(x), mean=True, size=len(x))
    assert norm(a - b for a, b in zip(wanted, got, strict=True)) <= 1e-5 * norm(wanted)


@pytest.mark.usefixtures("all_digits")
@pytest.mark.parametrize("name", ["language model", "convolutions", "linear", "lstm"])
def test_a_sum_as_loss_and_physical_batches_change_nothing(name):
    torch.manual_seed(1)
    net, x = MODELS[name]()
    wanted, got = compare(net, views_of(x), mean=False, size=2)
    assert norm(a - b for a, b in zip(wanted, got, strict=True)) <= 1e-5 * norm(wanted)


class Own(Part):
    """A part of the user's own, which knows nothing of views."""

    def __init__(self, part):
        self._part = part

    def each(self):
        return self._part.each()

    def norms(self):
        return self._part.norms()

    def weighted(self, factors):
        return self._part.weighted(factors)


def test_a_part_of_the_users_own_is_grouped_by_its_gradients():
    torch.manual_seed(3)
    left, right = torch.randn(2 * K, 3, 40), torch.randn(2 * K, 3, 40)
    part = Outer(left, right, torch.Size([40, 40]))
    wanted, found = grouped(part, K), grouped(Own(part), K)
    a, b = wanted.norms(), found.norms()
    assert torch.allclose(a.squares.sum(1).float(), b.squares.sum(1), rtol=1e-4)
    assert (b.spread.sum(1) >= 0.999 * a.spread.sum(1)).all()
    assert b.terms == 2 * K * part.norms().terms
    factors = Factors(torch.tensor([0.3, 2.0]))
    assert torch.allclose(found.weighted(factors), wanted.weighted(factors), atol=1e-3)


@pytest.mark.parametrize("weight", ["kept", "large"])
def test_the_views_of_a_convolution_are_added_up_before_norms_are_made(weight):
    torch.manual_seed(2)
    channels, side = (3, 8) if weight == "kept" else (64, 2)
    module = nn.Conv2d(channels, 64, 3, padding=1, groups=1, bias=False)
    x = torch.randn(2 * K, channels, side, side)
    part = Convolution(module, x, torch.randn_like(module(x)).detach())
    found = grouped(part, K)
    assert isinstance(found, Convolution)  # and not the norms of rows, which nobody needs
    each = part.each().unflatten(0, (2, K)).sum(1)
    factors = Factors(torch.tensor([0.3, 2.0]))
    assert torch.allclose(found.norms().squares.sum(1), each.flatten(1).square().sum(1), rtol=1e-4)
    assert torch.allclose(found.weighted(factors), 0.3 * each[0] + 2.0 * each[1], atol=1e-3)
    assert torch.allclose(found.each(), each, atol=1e-4)


class Jittered(Dataset):
    """Examples with random augmentation."""

    def __init__(self):
        self.data = dataset()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x + 0.3 * torch.randn(12), y


def run(views, *, data=None, workers=0, steps=6, step_function=False, **options):
    """The weights after some steps, and the batches."""
    torch.manual_seed(5)
    net, engine = model(), PrivacyEngine(key=KEY)
    given = DataLoader(data or dataset(), batch_size=10, num_workers=workers)
    _, optimizer, batches = private(engine, net=net, data_loader=given, views=views, **options)
    reduce = options.get("loss_reduction", "mean")

    def loss(x, y):
        return nn.functional.cross_entropy(net(x), y, reduction=reduce)

    step = engine.step_function(loss) if step_function else None
    seen = []
    while engine.steps_taken < steps:
        for x, y in batches:
            seen.append(x)
            if step is not None:
                step(x, y)
                continue
            optimizer.zero_grad()
            loss(x, y).backward()
            optimizer.step()
    return weights(net), seen


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampling": "balls-in-bins"},
        {"mechanism": "dp_sgd", "sampling": "poisson"},
        {"max_physical_batch_size": 4},
        {"loss_reduction": "sum"},
        {"step_function": True},
        {"workers": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
@pytest.mark.usefixtures("all_digits")
def test_equal_views_are_one_view(options):
    once, _ = run(1, **options)
    often, seen = run(K, **options)
    assert all(len(x) % K == 0 and torch.equal(x[::K], x[1::K]) for x in seen)
    assert torch.allclose(once, often, atol=1e-6)


@pytest.mark.parametrize("workers", [0, 2])
def test_views_are_drawn_apart_and_repeat(workers):
    found, seen = run(2, data=Jittered(), workers=workers)
    for x in seen:
        assert len(x) == 20
        assert not any(torch.equal(a, b) for a, b in zip(x[::2], x[1::2], strict=True))
    again, _ = run(2, data=Jittered(), workers=workers)
    assert torch.equal(found, again)
    if workers:
        small, _ = run(2, data=Jittered(), workers=1, max_physical_batch_size=3)
        assert torch.allclose(found, small, atol=1e-6)


def test_what_has_no_views_is_refused():
    with pytest.raises(ValueError, match="views must be 1 with grad_sample_mode='hooks', got 2"):
        private(PrivacyEngine(key=KEY), views=2, grad_sample_mode="hooks")
    with pytest.raises(ValueError, match="views"):
        private(PrivacyEngine(key=KEY), views=0)
    net = model()
    _, optimizer, batches = private(PrivacyEngine(key=KEY), net=net, views=2, data_loader=loader())
    x, y = next(iter(batches))
    nn.functional.cross_entropy(net(x[:19]), y[:19]).backward()
    with pytest.raises(ValueError, match="must have 2 rows for each example"):
        optimizer.step()
