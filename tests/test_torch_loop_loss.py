"""Losses of ordinary loops that mix examples are refused before the backward pass."""

from __future__ import annotations

import dataclasses
import gc
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from training import KEY, private, weights

from corrnoise.records import keys
from corrnoise.torch import PrivacyEngine
from corrnoise.torch.clipping import loop_loss
from corrnoise.torch.clipping.clipper import Clipper

BATCH, BATCHES, LENGTH, WIDTH, CLASSES = 12, 3, 5, 6, 3
MODES = ("one_pass", "hooks")
CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 9.0])
MIXED = "mean or a sum over examples, each by itself"


@pytest.fixture(autouse=True)
def nobody_else_looks():
    """Engines of other tests may be alive."""
    for each in list(loop_loss._looking):
        each.close()


class Network(nn.Module):
    """One prediction for each example."""

    def __init__(self, width=CLASSES):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, width)

    def forward(self, x):
        return self.last(self.first(x[:, 0]).tanh())


class Tagger(Network):
    """One prediction for each position."""

    def forward(self, x):
        return self.last(self.first(x).tanh())


class WithLoss(Tagger):
    """As in transformers: it gives the loss itself."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, x, y, tags):
        return self.loss(super().forward(x), y, tags)


class TwoHeads(Network):
    """What is hidden is an output too."""

    def forward(self, x):
        hidden = self.first(x[:, 0]).tanh()
        return hidden, self.last(hidden)


def data():
    """Inputs, a class each, and tags of positions, of which -100 counts for nothing.

    The first two batches have no example of the last class.
    """
    torch.manual_seed(1)
    count = BATCH * BATCHES
    x = torch.randn(count, LENGTH, WIDTH)
    y = torch.arange(count) % 5 % (CLASSES - 1) + (torch.arange(count) > 2.5 * BATCH)
    tags = torch.randint(CLASSES, (count, LENGTH))
    tags[torch.arange(LENGTH) > torch.randint(LENGTH, (count, 1))] = -100
    return TensorDataset(x, y, tags)


def run(loss, net, *, mode="one_pass", step=None, look=True, **options):
    """Two epochs of a loop; the number of steps and the final weights are returned."""
    engine = PrivacyEngine(key=KEY)
    batches = DataLoader(data(), batch_size=BATCH)
    options = {"data_loader": batches, "grad_sample_mode": mode, "epochs": 2, **options}
    model, optimizer, loader = private(engine, net=net, **options)
    if not look:
        sums = engine._setup.step.sums
        (sums.clipper.recorder.loss if mode == "one_pass" else sums._calls.loss).close()
    torch.manual_seed(3)
    for _ in range(2):
        for x, y, tags in loader:
            optimizer.zero_grad()
            if step:
                step(model, x, y, tags)
            else:
                loss(model(x), y, tags).backward()
            optimizer.step()
    return engine.steps_taken, weights(net)


def passes(loss, make, **options):
    """A loop runs as it does where nobody looks at it, to the last bit."""
    torch.manual_seed(3)
    steps, found = run(loss, make(), **options)
    _, wanted = run(loss, make(), look=False, **options)
    assert steps == 2 * BATCHES
    assert found.equal(wanted)


def refused(loss, net, *, after=0, match=MIXED, **options):
    """A loop is refused after some steps, and nothing of the next is released."""
    before = weights(net)
    taken = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: taken.append(weights(net)))
    with pytest.raises(ValueError, match=match) as error:
        run(loss, net, optimizer=optimizer, **options)
    assert len(taken) == after
    assert weights(net).equal([before, *taken][-1])
    return str(error.value)


def masked_mean(o, _, t):
    losses = functional.cross_entropy(o.transpose(1, 2), t, reduction="none")
    kept = t != -100
    return ((losses * kept).sum(1) / kept.sum(1)).mean()


def masked_sums(o, t):
    return functional.cross_entropy(o.transpose(1, 2), t, reduction="none").sum(1)


def shifted(o, y, _):
    """By the largest number of all examples, which cancels but for rounding."""
    o = o - o.max()
    return (o.exp().sum(1).log() - o[torch.arange(len(o)), y]).mean()


def tag_by_tag(o, _, t):
    return sum(functional.cross_entropy(a, b) for a, b in zip(o, t, strict=True)) / len(o)


def one_by_one(o, y, _):
    pairs = zip(o, y, strict=True)
    return sum(functional.cross_entropy(a[None], b[None], CLASS_WEIGHTS) for a, b in pairs) / len(o)


def logged(o, y, _):
    loss = functional.cross_entropy(o, y)
    assert (o.argmax(1) == y).sum().item() <= BATCH
    assert loss.item() > 0
    assert str(y.float().mean())
    return loss


def distilled(o, y, _):
    teacher = functional.softmax(o.detach() / 2.0, 1)
    loss = functional.kl_div((o / 2.0).log_softmax(1), teacher, reduction="batchmean")
    return functional.cross_entropy(o, y, label_smoothing=0.1) + 4.0 * loss


def in_place(o, y, _):
    o /= 2.0
    return functional.cross_entropy(o, y)


def checkpointed(o, y, _):
    return checkpoint(functional.cross_entropy, o, y, use_reentrant=False)


class Scaled(torch.autograd.Function):
    """Bears one backward pass alone, as fused losses do: it scales what it keeps in place."""

    @staticmethod
    def forward(ctx, o, y):
        with torch.enable_grad():
            inner = o.detach().requires_grad_()
            loss = functional.cross_entropy(inner, y)
            (ctx.grad,) = torch.autograd.grad(loss, inner)
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.grad *= grad
        return ctx.grad, None


class Learned(nn.Module):
    """A temperature that another optimizer trains."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, o, y, _):
        with torch.no_grad():
            self.scale.copy_(self.scale % 6 + 1)
        return functional.cross_entropy(o / self.scale, y) + o.square().mean() / self.scale


class Warming:
    """Less of a term with every step of a run."""

    def __init__(self):
        self.steps = 0

    def __call__(self, o, y, _):
        self.steps = self.steps % (2 * BATCHES) + 1
        return functional.cross_entropy(o, y) + o.square().mean() / self.steps


APART = {
    "cross entropy": lambda o, y, _: functional.cross_entropy(o, y),
    "sum over the size": lambda o, y, _: functional.cross_entropy(o, y, reduction="sum") / len(o),
    "equal weights": lambda o, y, _: functional.cross_entropy(o, y, torch.full((CLASSES,), 2.0)),
    "weights of each": lambda o, y, _: (
        CLASS_WEIGHTS[y] * functional.cross_entropy(o, y, reduction="none")
    ).mean(),
    "one by one": one_by_one,
    "logged": logged,
    "shifted": shifted,
    "distilled": distilled,
    "by hand": lambda o, y, _: -o.log_softmax(1)[torch.arange(len(o)), y].mean(),
    "squares": lambda o, y, _: functional.mse_loss(o[:, 0], y.float()),
    "sigmoids": lambda o, y, _: functional.binary_cross_entropy_with_logits(
        o, functional.one_hot(y, CLASSES).float(), pos_weight=CLASS_WEIGHTS
    ),
    "triplets": lambda o, y, _: functional.triplet_margin_loss(o, o.detach() + 1, -o),
    "penalty": lambda o, y, _: functional.cross_entropy(o, y) + 0.1 * o.square().mean(),
    "linear": lambda o, y, _: o.mean(),
    "constant": lambda o, y, _: 0.0 * o.sum(),
    "sum of shares": lambda o, y, _: (o.square() / len(o)).sum(),
    "sum over classes of means": lambda o, y, _: o.square().mean(0).sum(),
    "weights that add up to one": lambda o, y, _: functional.binary_cross_entropy_with_logits(
        o, o.detach().sigmoid(), torch.full((len(o), 1), 1.0 / len(o)), reduction="sum"
    ),
    "dropout": lambda o, y, _: functional.cross_entropy(functional.dropout(o, 0.3), y),
    "tasks": lambda o, y, _: torch.stack(
        [functional.cross_entropy(o, y), o.square().mean()]
    ).mean(),
    "function of one's own": lambda o, y, _: Scaled.apply(o, y) / 2.0,
    "checkpointed": checkpointed,
    "logarithm of exponential": lambda o, y, _: o.exp().log().mean(),
    "largest of each": lambda o, y, _: functional.cross_entropy(
        torch.cat([o.amax(1, keepdim=True), o.topk(2, 1).values], 1), y
    ),
    "ordered one by one": lambda o, y, _: sum(row.sort().values[0] for row in o) / len(o),
    "split one by one": lambda o, y, _: (
        sum(functional.cross_entropy(a, y[i : i + 1]) for i, a in enumerate(o.split(1))) / len(o)
    ),
    "picked one by one": lambda o, y, _: (
        sum(functional.cross_entropy(o[-i], y[-i], CLASS_WEIGHTS) for i in range(1, len(o) + 1))
        / len(o)
    ),
    "sliced one by one": lambda o, y, _: (
        sum(
            functional.cross_entropy(o[i : i + 1], y[i : i + 1], CLASS_WEIGHTS)
            for i in range(len(o))
        )
        / len(o)
    ),
    "listed one by one": lambda o, y, _: (
        sum(functional.cross_entropy(o[[i]], y[[i]], CLASS_WEIGHTS) for i in range(len(o))) / len(o)
    ),
    "selected one by one": lambda o, y, _: torch.stack(
        [
            functional.cross_entropy(o.index_select(0, i), y[i], CLASS_WEIGHTS)
            for i in torch.arange(len(o)).split(1)
        ]
    ).mean(),
    "shifted by a large number": lambda o, y, _: shifted(30.0 * o, y, _),
    "infinite": lambda o, y, _: functional.cross_entropy(
        o.masked_fill((y[:, None] < 2) & (torch.arange(CLASSES) == 2), -torch.inf), y
    ),
}
OF_POSITIONS = {
    "masked mean": masked_mean,
    "one by one": tag_by_tag,
    "time first": lambda o, _, t: torch.stack(
        [
            functional.cross_entropy(o.transpose(0, 1)[: int(n), i], t[i, : int(n)])
            for i, n in enumerate((t != -100).sum(1))
        ]
    ).mean(),
    "packed": lambda o, _, t: torch.stack(
        [
            part.mean()
            for part in functional.cross_entropy(o.transpose(1, 2), t, reduction="none")[
                t != -100
            ].split((t != -100).sum(1).tolist())
        ]
    ).mean(),
    "first": lambda o, y, _: functional.cross_entropy(o[:, 0], y),
    "all": lambda o, _, t: functional.cross_entropy(o.flatten(0, 1), t.clamp(min=0).flatten()),
    "constant divisor": lambda o, _, t: (
        functional.cross_entropy(o.transpose(1, 2), t, reduction="sum") / BATCH
    ),
    "pooled": lambda o, y, _: functional.cross_entropy(o.amax(1), y),
    "largest of all positions": lambda o, y, _: functional.cross_entropy(
        o.flatten(1).topk(CLASSES, 1).values, y
    ),
}
# As many outputs as examples, by coincidence.
AS_MANY = {
    "cross entropy": lambda o, y, _: functional.cross_entropy(o, y),
    "by hand": lambda o, y, _: -(o - o.logsumexp(1, keepdim=True))[range(len(o)), y].mean(),
    "differences": lambda o, y, _: (o - functional.one_hot(y, BATCH)).abs().mean(),
    "shifted": lambda o, y, _: functional.cross_entropy(o - o.amax(1, keepdim=True), y),
}
REFUSED = {
    "weights": (
        lambda o, y, _: functional.cross_entropy(o, y, CLASS_WEIGHTS),
        "weights of classes",
    ),
    "weights and smoothing": (
        lambda o, y, _: functional.cross_entropy(o, y, CLASS_WEIGHTS, label_smoothing=0.1),
        "weights of classes",
    ),
    "module": (
        lambda o, y, _: nn.NLLLoss(CLASS_WEIGHTS)(o.log_softmax(1), y),
        "weights of classes",
    ),
    "outer": (lambda o, y, _: (o[:, :1] - y.float()).square().mean(), "table of 12 times 12"),
    "outer, with one more dimension": (
        lambda o, y, _: (o[:, :1, None] - y[:, None].float()).abs().mean(),
        "table of 12 times 12",
    ),
    "distances": (lambda o, y, _: torch.cdist(o, o).mean(), "table of 12 times 12"),
    "distances of halves": (lambda o, *_: torch.cdist(o[:6], o[6:]).mean(), "by distances"),
    "distances of all pairs": (
        lambda o, *_: functional.pdist(o).square().mul(-2.0).exp().mean().log(),
        "by distances",
    ),
    "largest": (
        lambda o, y, _: functional.cross_entropy(o, y, reduction="none").max(),
        r"the largest.*\(Max",
    ),
    "hard ones": (
        lambda o, y, _: functional.cross_entropy(o, y, reduction="none").topk(4).values.mean(),
        r"the largest.*\(Topk",
    ),
    "centred": (lambda o, y, _: functional.cross_entropy(o - o.mean(0), y), "change with"),
    "contrast": (
        lambda o, *_: functional.cross_entropy(o @ o.T, torch.arange(len(o))),
        "change with",
    ),
    "neighbours": (lambda o, y, _: (o * o.roll(1, 0)).sum(), "change with"),
    "pairs": (lambda o, y, _: (o[::2] * o[1::2]).sum(), "change with"),
    "variance": (
        lambda o, y, _: functional.cross_entropy(o, y) + (1.0 - o.std(0)).relu().mean(),
        "change with",
    ),
    "normalised": (
        lambda o, y, _: functional.cross_entropy(
            functional.batch_norm(o, None, None, training=True), y
        ),
        "change with",
    ),
    "distances of one number": (
        lambda o, *_: torch.cdist(o[:, :1], o[:, :1]).mean(),
        "table of 12 times 12",
    ),
    "hinges of pairs": (
        lambda o, *_: (1.0 - o[:, :1] + o[:, 0]).relu().mean(),
        "table of 12 times 12",
    ),
    "larger ones of pairs": (
        lambda o, *_: torch.maximum(o[:, :1], o[:, 0].expand(len(o), -1)).mean(),
        "table of 12 times 12",
    ),
    "largest of each class": (lambda o, *_: o.amax(0).mean(), r"the largest.*\(Amax"),
    "smallest of one class": (lambda o, *_: o[:, :1].min(), r"the largest.*\(Min"),
    "sorted": (
        lambda o, *_: (o.sort(0).values * torch.arange(len(o))[:, None]).mean(),
        r"the largest.*\(Sort",
    ),
    "one by one, and all": (
        lambda o, y, _: one_by_one(o, y, _) + functional.cross_entropy(o, y, CLASS_WEIGHTS),
        "weights of classes",
    ),
    "one by one, and the largest": (
        lambda o, y, _: (
            one_by_one(o, y, _) + functional.cross_entropy(o, y, reduction="none").max()
        ),
        r"the largest.*\(Max",
    ),
    "one by one, less what others have": (
        lambda o, y, _: one_by_one(o - o.mean(0), y, _),
        "change with",
    ),
    "little of others": (
        lambda o, y, _: functional.cross_entropy(o - 1e-2 * o.mean(0), y),
        "change with",
    ),
}
# What is a sum over examples beyond doubt, and a mean.
SUMS = {
    "cross entropy": lambda o, y, _: functional.cross_entropy(o, y, reduction="sum"),
    "a term": lambda o, y, _: (
        functional.mse_loss(o, o.detach() + 1, reduction="sum") - 0.5 * (1 + o - o.exp()).sum()
    ),
    "by hand": lambda o, y, _: -o.log_softmax(1)[torch.arange(len(o)), y].sum(),
    "squares": lambda o, y, _: ((o - 1.0) ** 2).sum(1).sum(),
    "one by one": lambda o, y, _: sum(
        functional.cross_entropy(a[None], b[None]) for a, b in zip(o, y, strict=True)
    ),
    "stacked": lambda o, y, _: torch.stack(
        [functional.cross_entropy(a, b) for a, b in zip(o, y, strict=True)]
    ).sum(),
    "likelihood": lambda o, y, _: -torch.distributions.Categorical(logits=o).log_prob(y).sum(),
}
MEANS = {
    "cross entropy": lambda o, y, _: functional.cross_entropy(o, y),
    "a term": lambda o, y, _: functional.cross_entropy(o, y) + 0.1 * o.exp().sum(),
    "by hand": lambda o, y, _: (o - 1.0).abs().mean(),
}
AS_SUMS = {
    "mean times the size": lambda o, y, _: len(o) * functional.cross_entropy(o, y),
    "mean of multiples": lambda o, y, _: (len(o) * (o - 1.0).abs().sum(1)).mean(),
    "sum of means": lambda o, y, _: (o - 1.0).abs().mean(1).sum(),
    "products": lambda o, y, _: (CLASS_WEIGHTS * o.square()).sum(),
}
# What is a sum for batches of all sizes.
SCALED = {
    "over a constant": lambda o, y, _: functional.cross_entropy(o, y, reduction="sum") / BATCH,
    "smoothed": lambda o, y, _: functional.cross_entropy(
        o, y, reduction="sum", label_smoothing=0.1
    ),
    "one by one": lambda o, y, _: 0.5 * sum((row - 1.0).square().sum() for row in o),
    "mean times the size": lambda o, y, _: len(o) * functional.cross_entropy(o, y) / BATCH,
}
# What needs a second batch to compare with.
DIVIDED = {
    "masked": lambda o, _, t: (
        functional.cross_entropy(o.transpose(1, 2), t, reduction="sum") / (t != -100).sum()
    ),
    "a number of Python's": lambda o, _, t: (
        functional.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum")
        / (t != -100).sum().item()
    ),
    "mean of those selected": lambda o, _, t: functional.cross_entropy(
        o.transpose(1, 2), t, reduction="none"
    )[t != -100].mean(),
    "losses before their sum": lambda o, _, t: (
        functional.cross_entropy(o.transpose(1, 2), t, reduction="none") / (t != -100).sum()
    ).sum(),
    "by a product": lambda o, _, t: (
        functional.cross_entropy(o.transpose(1, 2), t, reduction="sum")
        * (t != -100).sum().reciprocal()
    ),
    "losses before their sum, by a number of Python's": lambda o, _, t: (
        masked_sums(o, t) / float((t != -100).sum())
    ).sum(),
    "by its own size": lambda o, _, t: o.square().sum() / o.square().sum().item(),
}
TOKENS = {
    "mean over tokens": lambda o, _, t: functional.cross_entropy(o.transpose(1, 2), t),
    "flattened": lambda o, _, t: functional.cross_entropy(o.flatten(0, 1), t.flatten()),
    "selected": lambda o, _, t: functional.cross_entropy(o[t != -100], t[t != -100]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", APART)
def test_a_loss_of_each_example_passes(name, mode):
    passes(APART[name], Network, mode=mode)


@pytest.mark.parametrize("name", OF_POSITIONS)
def test_a_loss_of_positions_passes(name):
    passes(OF_POSITIONS[name], Tagger)


def test_outputs_that_change_in_place_are_followed():
    # Opacus's hooks let nobody do that.
    passes(in_place, Network)
    refused(lambda o, y, _: functional.cross_entropy(o.sub_(o.mean(0)), y), Network())


@pytest.mark.parametrize("name", AS_MANY)
def test_as_many_outputs_as_examples(name):
    passes(AS_MANY[name], lambda: Network(BATCH))


def test_a_learned_divisor_is_no_count():
    passes(Learned(), Network)


def test_a_number_of_steps_is_no_count_of_the_batch():
    for mode in MODES:
        passes(Warming(), Network, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_mixes_examples_is_refused_at_the_first_step(name, mode):
    loss, why = REFUSED[name]
    assert re.search(why, refused(loss, Network(), mode=mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_refused_where_a_mean_was_told(name, mode):
    match = "must be a mean .* grow with the size .* 12 here"
    refused(SUMS[name], Network(), match=match, mode=mode)
    passes(SUMS[name], Network, mode=mode, loss_reduction="sum")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_refused_where_a_sum_was_told(name, mode):
    match = "must be a sum .* shrink with the size .* 12 here"
    refused(MEANS[name], Network(), match=match, mode=mode, loss_reduction="sum")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SCALED)
def test_a_sum_times_a_constant_is_refused_with_a_batch_of_another_size(name, mode):
    def loop(reduction):
        keys._RELEASED.clear()
        options = {"sampling": "poisson", "mechanism": "dp_sgd", "loss_reduction": reduction}
        return run(SCALED[name], Network(), mode=mode, **options)

    with pytest.raises(ValueError, match=r"must be a mean over the examples .* but it is a sum"):
        loop("mean")
    assert loop("sum")[0] == 2 * BATCHES
    passes(SCALED[name], Network, mode=mode)  # with batches of one size it may be a mean


def test_a_sum_that_is_clipped_as_a_mean_moves_others():
    def total(count):
        net = nn.Linear(1, 1, bias=False)
        clipper = Clipper(net, list(net.parameters()), 1.0)
        clipper.recorder.loss.close()
        net(torch.full((count, 1), 1 / 64)).sum().backward()
        return clipper.sums()[0].item()

    assert 1.9 < total(64) - total(63) < 2.0  # where the clip norm is 1


def test_a_penalty_on_other_weights_is_no_sum_over_examples():
    other = nn.Parameter(torch.ones(BATCH))
    loss = lambda o, y, _: functional.cross_entropy(o, y) + other.square().sum()  # noqa: E731
    passes(loss, Network)


@pytest.mark.parametrize("name", AS_SUMS)
def test_what_may_be_a_sum_passes_where_a_sum_was_told(name):
    passes(AS_SUMS[name], Network, loss_reduction="sum")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TOKENS)
def test_a_mean_over_all_tokens_is_refused(name, mode):
    assert "without padding" in refused(TOKENS[name], Tagger(), mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DIVIDED)
def test_a_divisor_that_goes_with_the_batch_is_refused_at_the_second_step(name, mode):
    assert "it is divided by" in refused(DIVIDED[name], Tagger(), mode=mode, after=1)


@pytest.mark.parametrize("mode", MODES)
def test_a_refused_batch_that_comes_again_is_refused_again(mode):
    """As when a cell of a notebook is run once more."""
    engine, batches = PrivacyEngine(key=KEY), DataLoader(data(), batch_size=BATCH)
    model, optimizer, loader = private(
        engine, net=Tagger(), data_loader=batches, grad_sample_mode=mode, epochs=2
    )

    def cell():
        for x, y, tags in loader:
            optimizer.zero_grad()
            DIVIDED["masked"](model(x), y, tags).backward()
            optimizer.step()

    for _ in range(5):
        with pytest.raises(ValueError, match="it is divided by"):
            cell()
        assert engine.steps_taken == 1


@dataclasses.dataclass
class Predictions:
    logits: torch.Tensor


class InDataclass(Network):
    def forward(self, x):
        return Predictions(super().forward(x))


class InObject(Network):
    def forward(self, x):
        return SimpleNamespace(logits=super().forward(x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [InDataclass, InObject])
def test_outputs_in_objects_of_ones_own(kind, mode):
    def step(loss):
        return lambda model, x, y, _: loss(model(x).logits, y, _).backward()

    passes(None, kind, mode=mode, step=step(APART["cross entropy"]))
    for name in ("weights", "outer", "centred"):
        loss, why = REFUSED[name]
        if mode == "one_pass" or name != "centred":  # Opacus's hooks bear one derivative
            assert re.search(why, refused(None, kind(), mode=mode, step=step(loss)))


def test_what_a_model_keeps_beside_its_outputs():
    class Keeping(Network):
        def forward(self, x):
            self.hidden = self.first(x[:, 0]).tanh()
            return self.last(self.hidden)

    def step(part):
        def work(model, x, y, _):
            loss = functional.cross_entropy(model(x), y)
            (loss + part(model.hidden)).backward()

        return work

    passes(None, Keeping, step=step(lambda hidden: hidden.square().mean()))
    spread = lambda hidden: (1.0 - hidden.std(0)).relu().mean()  # noqa: E731
    assert "change with" in refused(None, Keeping(), step=step(spread))


def test_a_second_call_before_backward_hides_nothing():
    def step(loss):
        def work(model, x, y, _):
            found = loss(model(x), y, _)
            for count in (BATCH, 5, 1):
                model(x[:count]).detach()
            found.backward()

        return work

    passes(None, Network, step=step(APART["cross entropy"]))
    assert "weights of classes" in refused(None, Network(), step=step(REFUSED["weights"][0]))


def test_a_loss_that_the_model_gives_is_looked_at():
    first = lambda o, y, _: functional.cross_entropy(o[:, 0], y)  # noqa: E731
    step = lambda model, *batch: model(*batch).backward()  # noqa: E731
    for mode in MODES:
        passes(None, lambda: WithLoss(first), mode=mode, step=step)
        refused(None, WithLoss(TOKENS["mean over tokens"]), mode=mode, step=step)
        refused(None, WithLoss(lambda o, y, _: first(o - o.mean(0), y, _)), mode=mode, step=step)


@pytest.mark.parametrize("mode", MODES)
def test_every_backward_pass_of_a_batch_is_looked_at(mode):
    def step(last):
        def work(model, x, y, _):
            hidden, out = model(x)
            # A hidden output that others come from is not differentiated through them.
            loss = functional.cross_entropy(out, y) + 0.1 * hidden.square().mean()
            loss.backward(retain_graph=mode == "one_pass" and last)
            if last:
                functional.cross_entropy(out, y, CLASS_WEIGHTS).backward()

        return work

    passes(None, TwoHeads, mode=mode, step=step(False))
    if mode == "one_pass":  # Opacus takes one pass alone
        assert "weights of classes" in refused(None, TwoHeads(), step=step(True))


def test_results_of_one_function_are_outputs_by_themselves():
    class Parts(Network):
        def forward(self, x):
            return self.last(self.first(x[:, 0]).tanh()).split(CLASSES, 1)

    def work(mixed):
        def step(model, x, y, _):
            first, second = model(x)
            loss = functional.cross_entropy(first, y)
            if mixed:
                second = second - second.mean(0)
            (loss + functional.cross_entropy(second, y)).backward()

        return step

    passes(None, lambda: Parts(2 * CLASSES), step=work(False))
    assert "change with" in refused(None, Parts(2 * CLASSES), step=work(True))


@pytest.mark.parametrize("mode", MODES)
def test_a_number_of_the_model_that_is_no_sum_over_examples(mode):
    """Such as the load balancing of experts, which is of how often the others chose each."""

    class Routed(Network):
        def forward(self, x, y):
            out = super().forward(x)
            chosen = functional.one_hot(x[:, 0, :CLASSES].argmax(1), CLASSES).float().mean(0)
            balance = (chosen * out.softmax(1).mean(0)).sum()
            each = functional.cross_entropy(out, y)
            return SimpleNamespace(loss=each, balance=balance), each, balance, each + balance

    def work(loss):
        def step(model, x, y, _):
            loss(*model(x, y)[1:]).backward()

        return step

    passes(None, Routed, mode=mode, step=work(lambda each, balance, both: each))
    for loss in (
        lambda each, balance, both: both,
        lambda each, balance, both: 1e-6 * balance + each,
        lambda each, balance, both: balance,
    ):
        why = refused(None, Routed(), mode=mode, step=work(loss))
        assert "a number of the model that is no sum over examples" in why


@pytest.mark.parametrize("mode", MODES)
def test_means_over_tokens_whose_number_happens_to_fit(mode):
    """As many real tags as a multiple of the examples, in every batch."""

    def fits(out, y, tags):
        real = torch.zeros_like(tags)
        real[::2, :4], real[1::2, :2] = 1, 1
        losses = functional.cross_entropy(out.transpose(1, 2), tags.clamp_min(0), reduction="none")
        return (losses * real * (1 + y[:, None] / 10)).sum() / (3 * len(y))

    def mixes(out, y, tags):
        tags = tags.clamp_min(0).where(torch.arange(LENGTH) < 1 + y[:, None] * 3, -100)
        tags[-1] = -100
        missing = -int((tags >= 0).sum()) % len(y)
        tags[-1, :missing] = 0
        return functional.cross_entropy(out.transpose(1, 2), tags)

    def step(model, x, y, tags):
        model(x, y, tags).backward()

    passes(None, lambda: WithLoss(fits), mode=mode, step=step)
    refused(None, WithLoss(mixes), mode=mode, step=step)


def test_a_loss_beside_the_outputs_that_it_comes_from():
    class Both(Network):
        def __init__(self, mixed=False):
            super().__init__()
            self.mixed = mixed

        def forward(self, x, y):
            out = super().forward(x)
            shown = out - out.mean(0) if self.mixed else out
            return functional.cross_entropy(shown, y), out

    def step(model, x, y, _):
        loss, out = model(x, y)
        (loss + 0.1 * out.square().mean()).backward()

    for mode in MODES:
        passes(None, Both, mode=mode, step=step)
        assert "change with" in refused(None, Both(mixed=True), mode=mode, step=step)


def test_hidden_outputs_of_several_layers():
    class Hidden(Network):
        def forward(self, x):
            first = self.first(x[:, 0])
            return first, first.tanh(), self.last(first.tanh())

    def work(mixed):
        def step(model, x, y, _):
            first, hidden, out = model(x)
            shown = first - first.mean(0) if mixed else first
            (functional.cross_entropy(out, y) + (hidden * shown).mean()).backward()

        return step

    for mode in MODES:
        passes(None, Hidden, mode=mode, step=work(False))
    assert "change with" in refused(None, Hidden(), step=work(True))


@pytest.mark.parametrize("mode", MODES)
def test_hooks_on_outputs_are_called_once(mode):
    calls, grads = [], []

    def step(model, x, y, _):
        out = model(x)
        out.register_hook(calls.append)
        out.retain_grad()
        functional.cross_entropy(out, y).backward()
        grads.append(out.grad)

    passes(None, Network, mode=mode, step=step)
    assert len(calls) == 4 * BATCHES
    for seen, wanted in zip(grads[: 2 * BATCHES], grads[2 * BATCHES :], strict=True):
        assert seen.equal(wanted)


def test_tensors_that_are_kept_elsewhere_are_given_back_once():
    """As hooks that move what autograd saves to the disk, and delete it when it is read."""
    away = {}

    def put(tensor):
        away[len(away)] = tensor
        return len(away) - 1

    def step(model, x, y, _):
        with torch.autograd.graph.saved_tensors_hooks(put, lambda place: away.pop(place).clone()):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()

    passes(None, Network, step=step)


def test_outputs_that_are_large_are_not_differentiated_twice(monkeypatch):
    calls = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(1) or grad(*a, **k))
    monkeypatch.setattr(loop_loss, "_LARGEST", BATCH * CLASSES - 1)
    run(REFUSED["centred"][0], Network())
    assert not calls
    monkeypatch.setattr(loop_loss, "_LARGEST", BATCH * CLASSES)
    refused(REFUSED["centred"][0], Network())
    assert calls


def test_large_outputs_are_differentiated_twice_in_one_batch(monkeypatch):
    calls = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(1) or grad(*a, **k))
    monkeypatch.setattr(loop_loss, "_LARGE", BATCH * CLASSES - 1)
    run(APART["cross entropy"], Network())
    once = len(calls)
    monkeypatch.setattr(loop_loss, "_LARGE", BATCH * CLASSES)
    run(APART["cross entropy"], Network())
    assert len(calls) - once == 3 * once > 0


def test_losses_in_an_iterator():
    def step(loss):
        def work(model, x, y, _):
            some = iter([loss(model(x), y, _)])
            torch.autograd.backward(some)

        return work

    passes(None, Network, step=step(APART["cross entropy"]))
    refused(None, Network(), step=step(REFUSED["centred"][0]))


def test_a_sum_that_torch_cannot_differentiate_twice_is_refused():
    def total(o, *_):
        lengths = torch.full((len(o),), LENGTH), torch.full((len(o),), 2)
        targets = torch.tensor([[1, 2]]).expand(len(o), -1)
        found = o.log_softmax(2).transpose(0, 1)
        return functional.ctc_loss(found, targets, *lengths, reduction="sum")

    refused(total, Tagger(), match="must be a mean .* grow with the size .* 12 here")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo reads it
def test_a_compiled_step():
    def step(loss):
        def work(model, x, y, _):
            loss(model(x), y, _).backward()

        return torch.compile(work, backend="eager")

    passes(None, Network, step=step(APART["cross entropy"]))
    with pytest.raises(Exception, match=MIXED):
        run(None, Network(), step=step(REFUSED["weights"][0]))


@pytest.mark.parametrize("mode", MODES)
def test_other_losses_and_evaluation_in_between_do_not_matter(mode):
    other = Network()

    def step(loss):
        def work(model, x, y, _):
            out = model(x)
            functional.cross_entropy(other(x), y, CLASS_WEIGHTS).backward()
            with torch.no_grad():
                model.eval()(x)
            model.train()
            loss(out, y, _).backward()

        return work

    passes(None, Network, mode=mode, step=step(APART["cross entropy"]))
    assert "weights of classes" in refused(
        None, Network(), mode=mode, step=step(REFUSED["weights"][0])
    )


def test_pieces_of_a_batch_are_looked_at():
    passes(APART["cross entropy"], Network, max_physical_batch_size=4)
    refused(REFUSED["centred"][0], Network(), max_physical_batch_size=4)


def test_views_of_one_example_may_meet():
    class Twice(torch.utils.data.Dataset):
        def __len__(self):
            return BATCH * BATCHES

        def __getitem__(self, index):
            x, y, tags = data()[index]
            return x + 0.1 * torch.randn(x.shape), y, tags

    def near(o, y, _):
        pairs = o.unflatten(0, (-1, 2))
        return functional.cross_entropy(o, y) + (pairs[:, 0] - pairs[:, 1]).square().mean()

    batches = DataLoader(Twice(), batch_size=BATCH)
    torch.manual_seed(4)
    passes(near, Network, views=2, data_loader=batches)
    refused(REFUSED["centred"][0], Network(), views=2, data_loader=batches)
    with pytest.raises(ValueError, match=MIXED):
        passes(near, Network)
    for parts in (
        lambda o: [o[i : i + 2] for i in range(0, len(o), 2)],
        lambda o: o.split(2),
        lambda o: [o[[i, i + 1]] for i in range(0, len(o), 2)],
        lambda o: o.unflatten(0, (-1, 2)).unbind(),
    ):

        def pair_by_pair(o, y, _, parts=parts):
            pairs = zip(parts(o), y.split(2), strict=True)
            return sum(functional.cross_entropy(a, b, CLASS_WEIGHTS) for a, b in pairs) / len(o)

        passes(pair_by_pair, Network, views=2, data_loader=batches)
    refused(REFUSED["weights"][0], Network(), views=2, data_loader=batches)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_low_precision(kind):
    def step(loss):
        def work(model, x, y, _):
            with torch.autocast("cpu", kind):
                out = model(x)
                total = loss(out, y)
            total.backward()

        return work

    passes(None, Network, step=step(functional.cross_entropy))
    for count in (BATCH, BATCHES * BATCH):  # the larger a batch, the less each changes its mean
        whole = DataLoader(data(), batch_size=count)
        centred = lambda o, y: functional.cross_entropy(o - o.mean(0), y)  # noqa: E731
        refused(None, Network(), step=step(centred), data_loader=whole)


def test_backward_is_looked_at_for_three_batches():
    before = torch.autograd.backward
    seen = []

    def step(model, x, y, _):
        loss = functional.cross_entropy(model(x), y)
        seen.append(torch.autograd.backward is not before)
        loss.backward()

    run(None, Network(), step=step)
    assert seen == [True] * 3 + [False] * 3
    assert torch.autograd.backward is before


def test_losses_that_cannot_be_differentiated_twice_count_too():
    seen = []

    def step(model, x, y, _):
        out = model(x)
        others = torch.cdist(out[:, None], out.detach()[:1] + torch.ones(1, 2, CLASSES))
        others.mean().backward()  # torch has no second derivative of it
        seen.append(len(loop_loss._looking))

    run(None, Network(), step=step)
    assert seen == [1, 1, 1, 0, 0, 0]


def test_nobody_waits_for_ever(monkeypatch):
    monkeypatch.setattr(loop_loss, "_CALLS", 3)
    model, _, _ = private(
        PrivacyEngine(key=KEY), net=Network(), data_loader=DataLoader(data(), batch_size=BATCH)
    )
    model(torch.randn(4, LENGTH, WIDTH))
    for left in (1, 1, 0):
        torch.ones((), requires_grad=True).backward()
        assert len(loop_loss._looking) == left


def test_an_engine_that_is_left_leaves_backward_alone():
    before = torch.autograd.backward
    net = Network()
    engine = PrivacyEngine(key=KEY)
    made = private(engine, net=net, data_loader=DataLoader(data(), batch_size=BATCH))
    made[0](torch.randn(4, LENGTH, WIDTH))
    assert torch.autograd.backward is not before
    alive = weakref.ref(net)
    del made, net, engine
    gc.collect()
    assert alive() is None
    assert not loop_loss._looking
    torch.ones((), requires_grad=True).backward()


@pytest.mark.parametrize("mode", ["one_pass", "hooks", "functorch"])
def test_a_loss_that_was_checked_is_looked_at_no_more(mode):
    def centred(x, y):
        out = model(x)
        return functional.cross_entropy(out - out.mean(0), y)

    engine, batches = PrivacyEngine(key=KEY), DataLoader(data(), batch_size=BATCH)
    net = Network()
    options = {"data_loader": batches, "grad_sample_mode": mode, "epochs": 2}
    model, optimizer, loader = private(engine, net=net, **options)
    x, y, _ = data()[:6]
    with pytest.raises(ValueError, match="the loss must be the mean over the examples"):
        engine.check_loss(centred, x, y)
    engine.check_loss(lambda x, y: functional.cross_entropy(model(x), y), x, y)
    assert all(param.grad is None for param in net.parameters())
    assert all(getattr(param, "grad_sample", None) is None for param in net.parameters())
    for x, y, _ in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        assert not loop_loss._looking
        optimizer.step()
    assert engine.steps_taken == BATCHES


def test_expanded_weights_cannot_check_a_loss():
    engine = PrivacyEngine(key=KEY)
    private(engine, net=Network(), data_loader=DataLoader(data(), batch_size=BATCH),
            grad_sample_mode="ew")  # fmt: skip
    with pytest.raises(ValueError, match="'ew' does not take"):
        engine.check_loss(lambda x, y, _: x.sum(), *data()[:6])


def test_a_refused_loss_can_be_mended():
    def step(model, x, y, _):
        out = model(x)
        with pytest.raises(ValueError, match=MIXED):
            functional.cross_entropy(out, y, CLASS_WEIGHTS).backward()
        functional.cross_entropy(out, y).backward()

    def always(model, x, y, _):
        functional.cross_entropy(model(x), y).backward()

    once = iter([step])
    _, found = run(None, Network(), step=lambda *each: next(once, always)(*each))
    _, wanted = run(None, Network(), step=always)
    assert found.equal(wanted)
