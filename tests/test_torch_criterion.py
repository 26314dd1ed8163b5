"""The ghost modes: Opacus's scripts run, and no example adds more than the clip norm."""

from __future__ import annotations

import copy
import warnings

import opacus
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from training import KEY, dataset, model, private, train, weights

from corrnoise.torch import PrivacyEngine
from corrnoise.torch.clipping.reference import clipped_sums
from corrnoise.torch.criterion import ExampleLoss

COUNT = 12
# Losses whose values with reduction "none" have the shape of the outputs, and cross entropy.
LOSSES = {
    "mse": (nn.MSELoss, 1),
    "mse of 3": (nn.MSELoss, 3),
    "bce": (nn.BCEWithLogitsLoss, 1),
    "huber of 3": (nn.HuberLoss, 3),
    "cross entropy": (nn.CrossEntropyLoss, 4),
}


def sums(net, data, criterion, mode, *, reduction="mean", clip=1.0):
    """The clipped sums of one batch of all examples, before their noise."""
    engine = PrivacyEngine(key=KEY)
    made = private(
        engine,
        net=net,
        data_loader=DataLoader(data, batch_size=len(data)),
        max_grad_norm=clip,
        epochs=1,
        mechanism="bisr",
        grad_sample_mode=mode,
        loss_reduction=reduction,
        criterion=criterion,
    )
    found: list[torch.Tensor] = []
    ledger = engine._setup.step.ledger
    record = ledger.record

    def seeing(step, digest):
        found.append(engine._setup.step.sums.gradients()[0].double().clone())
        record(step, digest)

    ledger.record = seeing
    for x, y in made[-1]:
        made[1].zero_grad()
        made[2](made[0](x), y).backward()
        made[1].step()
    return found[0]


def targets(name, columns):
    generator = torch.Generator().manual_seed(3)
    if name == "cross entropy":
        return torch.randint(columns, (COUNT,), generator=generator)
    return torch.rand(COUNT, columns, generator=generator)


@pytest.mark.parametrize("mode", ["ghost", "ghost_fsdp"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_examples_are_clipped_whatever_the_shape_of_their_losses(name, reduction, mode):
    """Opacus multiplies factors (n,) by losses (n, 1): each example then counts n times."""
    kind, columns = LOSSES[name]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, columns))
    x = 3.0 * torch.randn(COUNT, 12)
    y = targets(name, columns)
    alone = kind(reduction=reduction)
    for clip in (0.05, 100.0):  # all are clipped, and none
        wanted = clipped_sums(
            lambda i: alone(net(x[i : i + 1]), y[i : i + 1]), list(net.parameters()), COUNT, clip
        )
        wanted = torch.cat([part.reshape(-1) for part in wanted]).double()
        criterion = kind(reduction=reduction)
        start = copy.deepcopy(net)  # which takes a step
        data = TensorDataset(x, y)
        found = sums(start, data, criterion, mode, reduction=reduction, clip=clip)
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5 * clip)
        assert criterion.reduction == reduction


class Language(nn.Module):
    """A next word from each word."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)

    def forward(self, x):
        return self.head(self.table(x))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_of_flattened_positions_are_those_of_opacus(reduction):
    torch.manual_seed(0)
    net = Language()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = opacus.PrivacyEngine()
    x, y = torch.randint(7, (2, 6, 4)).unbind(0)
    y[0, 1:], y[1] = -100, -100  # one has one word, and one has none
    _, _, theirs, _ = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=6),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode="ghost",
        loss_reduction=reduction,
        criterion=nn.CrossEntropyLoss(reduction=reduction),
    )
    ours = ExampleLoss(nn.CrossEntropyLoss(reduction=reduction), reduction)
    logits = net(x).detach()
    flat = (logits.view(-1, 7), y.view(-1))
    wanted = theirs(*flat, shape=logits.shape).item()
    assert float(ours(*flat, shape=logits.shape)) == pytest.approx(wanted, rel=1e-6)
    # The same with positions as a dimension of their own, which Opacus does not take.
    assert float(ours(logits.transpose(1, 2), target=y)) == pytest.approx(wanted, rel=1e-6)


def test_the_loss_of_an_example_does_not_depend_on_the_labels_of_others():
    """Torch's means do: over the tokens of a batch that count, and over the weights of classes."""
    torch.manual_seed(0)
    logits = torch.randn(2, 7, 4, requires_grad=True)
    criterion = nn.CrossEntropyLoss(weight=torch.arange(1.0, 8.0))
    found = {False: [], True: []}
    for one, other in ((0, 1), (0, -100), (0, 6)):
        y = torch.tensor([[1, 2, one, 3], [4, 5, other, other]])
        for ours in found:
            loss = (ExampleLoss(criterion, "mean") if ours else criterion)(logits, y)
            found[ours].append(torch.autograd.grad(loss, logits)[0][0])
    assert all(torch.equal(grad, found[True][0]) for grad in found[True])
    assert not torch.allclose(found[False][0], found[False][1])
    assert not torch.allclose(found[False][0], found[False][2])


def test_a_loss_of_the_users_own():
    seen = []

    class Own:
        reduction = "mean"

        def __call__(self, output, target):
            seen.append(self.reduction)
            if len(output) == 1:
                raise RuntimeError("no single example")
            return (output - target).abs()

    criterion = Own()
    loss = ExampleLoss(criterion, "mean")
    assert float(loss(torch.ones(3, 2), torch.zeros(3, 2))) == 1.0
    with pytest.raises(RuntimeError, match="no single example"):
        loss(torch.ones(1), torch.zeros(1))
    assert (seen, criterion.reduction) == (["none", "none"], "mean")
    plain = ExampleLoss(lambda output, target: (output - target).square(), "sum")
    assert float(plain(torch.full((3,), 2.0), torch.zeros(3))) == 12.0


def test_an_empty_batch_has_a_loss_of_zero():
    output = torch.zeros(0, 3, requires_grad=True)
    for criterion, target in (
        (nn.CrossEntropyLoss(), torch.zeros(0, dtype=torch.long)),
        (nn.MSELoss(), torch.zeros(0, 3)),
    ):
        loss = ExampleLoss(criterion, "mean")(output, target)
        assert float(loss.detach()) == 0.0
        loss.backward()
    assert output.grad is not None
    assert output.grad.shape == (0, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"criterion": nn.MSELoss(reduction="sum")}, "loss_reduction='mean', got 'sum'"),
        ({"noise_generator": torch.Generator(), "mechanism": "dp_sgd"}, "Opacus's own normals"),
        ({"clipping": "per_layer", "max_grad_norm": [1.0] * 4}, "clips all layers together"),
        ({"rand_on_empty": True}, "runs on empty batches"),
        ({"batch_first": False}, "first dimension"),
    ],
)
def test_what_the_ghost_modes_cannot_do_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        private(PrivacyEngine(key=KEY), grad_sample_mode="ghost", **options)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("kind", [nn.MSELoss, nn.L1Loss])
def test_losses_of_every_output_with_every_target_are_refused(kind):
    loss = ExampleLoss(kind(), "mean")
    one, many = torch.zeros(6, 1), torch.zeros(6)
    for given in ((one, many), (many, one)):
        with pytest.raises(ValueError, match=r"losses of shape \(6, 6\) for .* give both the same"):
            loss(*given)
    assert float(loss(one, one)) == float(loss(many, many)) == 0.0


def test_flattened_positions_need_the_shape_of_the_outputs():
    """Else the share of an example would depend on the length of the longest."""
    torch.manual_seed(0)
    x, y = torch.randint(7, (2, 6, 4)).unbind(0)
    made = private(
        PrivacyEngine(key=KEY),
        net=Language(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=6),
        grad_sample_mode="ghost",
    )
    logits = made[0](x)
    flat = (logits.flatten(0, 1), y.flatten())
    with pytest.raises(ValueError, match=r"each of the 6 examples .* shape \(24,\); pass shape="):
        made[2](*flat)
    assert float(made[2](*flat, shape=logits.shape).detach()) > 0.0
    with torch.no_grad():  # an evaluation of two examples
        assert float(made[2](made[0](x[:2]).flatten(0, 1), y[:2].flatten())) > 0.0


def test_a_criterion_with_one_number_for_a_batch_is_refused():
    made = private(
        PrivacyEngine(key=KEY), grad_sample_mode="ghost", criterion=functional.cross_entropy
    )
    x, y = next(iter(made[-1]))
    with pytest.raises(ValueError, match=r"loss of each example.*got one number"):
        made[2](made[0](x), y)


def test_pieces_of_a_batch_and_any_loss_give_the_same_run():
    """By Opacus's criterion or torch's own, at once or in pieces: clipping knows nothing of it."""
    found = []
    for criterion, largest in ((None, None), (None, 4), (nn.CrossEntropyLoss(), None)):
        net = model()
        made = private(
            PrivacyEngine(key=KEY),
            net=net,
            data_loader=DataLoader(dataset(), batch_size=10),
            grad_sample_mode="ghost",
            max_physical_batch_size=largest,
        )
        assert (made[0], type(made[2])) == (net, ExampleLoss)
        steps = 18 if largest is None else 54
        train(made[0], made[1], made[-1], steps=steps, criterion=criterion or made[2])
        found.append(weights(net))
    assert all(torch.allclose(each, found[0], atol=1e-5) for each in found)
