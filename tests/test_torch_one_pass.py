"""The engine with our own clipping: the same training as with Opacus, on the user's own objects."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from training import KEY, dataset, loader, model, private, weights

from corrnoise.torch import Adam, PrivacyEngine
from corrnoise.torch.captured import usual_size
from corrnoise.torch.clipping.clipper import Clipper
from corrnoise.torch.clipping.loss import check_loss
from corrnoise.torch.clipping.reference import clipped_sums


def start(**options):
    engine, net = PrivacyEngine(key=KEY), model()
    made = private(engine, net=net, **{"grad_sample_mode": "one_pass", **options})
    return engine, net, *made[1:]


def epoch(net, optimizer, batches, criterion=functional.cross_entropy):
    for x, y in batches:
        optimizer.zero_grad()
        criterion(net(x), y).backward()
        optimizer.step()


def close(a, b, share=2e-6):
    return float((a - b).norm()) <= share * float(b.norm())


def test_model_and_optimizer_are_the_users_own():
    engine, net = PrivacyEngine(key=KEY), model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    names = list(net.state_dict())
    made = private(engine, net=net, optimizer=optimizer)
    assert made[0] is net
    assert made[1] is optimizer
    assert list(net.state_dict()) == names


@pytest.mark.parametrize("sampling", ["fixed", "balls-in-bins"])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: Adam(p, lr=0.01),
    ],
)
def test_training_is_that_of_opacus(sampling, optimizer):
    found = []
    for mode in ("hooks", "one_pass"):
        engine, net = PrivacyEngine(key=KEY), model()
        made = private(
            engine, net=net, optimizer=optimizer(net.parameters()), sampling=sampling,
            grad_sample_mode=mode,
        )  # fmt: skip
        for _ in range(3):
            epoch(*made)
        assert engine.steps_taken == 18
        found.append(weights(net))
    assert close(*found)


def test_training_curves_on_digits_are_those_of_opacus():
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
    curves = []
    for mode in ("hooks", "one_pass"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        made = private(
            PrivacyEngine(key=KEY), net=net, data_loader=DataLoader(data, batch_size=64),
            grad_sample_mode=mode, epochs=2,
        )  # fmt: skip
        curve = []
        for _ in range(2):
            for a, b in made[2]:
                made[1].zero_grad()
                loss = functional.cross_entropy(made[0](a), b)
                loss.backward()
                made[1].step()
                curve.append(float(loss.detach()))
        curves.append(curve)
    assert np.allclose(*curves, rtol=1e-4)
    assert curves[0][-1] < curves[0][0]


def test_physical_batches_are_built_in():
    _, net, optimizer, batches = start()
    epoch(net, optimizer, batches)
    wanted = weights(net)
    for workers in (0, 2):
        engine, net, optimizer, batches = start(
            max_physical_batch_size=3, data_loader=loader(num_workers=workers)
        )
        assert len(batches) == 6 * 4  # batches of ten in pieces of three
        epoch(net, optimizer, batches)
        assert engine.steps_taken == 6
        assert close(weights(net), wanted)


def test_the_memory_manager_of_opacus_works():
    _, net, optimizer, batches = start()
    epoch(net, optimizer, batches)
    wanted = weights(net)
    engine, net, optimizer, batches = start()
    with BatchMemoryManager(
        data_loader=batches, max_physical_batch_size=3, optimizer=optimizer
    ) as small:
        epoch(net, optimizer, small)
    assert engine.steps_taken == 6
    assert close(weights(net), wanted)


def test_gradients_may_be_accumulated_by_hand():
    _, net, optimizer, batches = start(loss_reduction="sum")
    total = lambda output, y: functional.cross_entropy(output, y, reduction="sum")  # noqa: E731
    epoch(net, optimizer, batches, total)
    wanted = weights(net)
    _, net, optimizer, batches = start(loss_reduction="sum")
    for x, y in batches:
        for part in (slice(0, 4), slice(4, None)):
            total(net(x[part]), y[part]).backward()
        optimizer.step()
    assert close(weights(net), wanted)


@pytest.mark.parametrize("size", [40, 7])
def test_a_step_function_trains_the_same(size):
    _, net, optimizer, batches = start(sampling="balls-in-bins")
    epoch(net, optimizer, batches)
    engine, other, optimizer, batches = start(sampling="balls-in-bins")
    step = engine.step_function(lambda x, y: functional.cross_entropy(other(x), y), size=size)
    for x, y in batches:
        step(x, y)
    assert engine.steps_taken == 6
    assert close(weights(other), weights(net))


def test_the_size_of_a_step_function_is_rarely_exceeded():
    engine, *_ = start(sampling="balls-in-bins")
    size = usual_size(engine.plan)
    generator = np.random.default_rng(0)
    drawn = generator.binomial(engine.plan.num_examples, 1 / 6, 100_000)
    assert engine.plan.expected_batch < size <= engine.plan.num_examples
    assert (drawn > size).mean() <= 1e-4


def test_work_between_steps_changes_nothing():
    _, net, optimizer, batches = start()
    epoch(net, optimizer, batches)
    wanted = weights(net)
    engine, net, optimizer, batches = start()
    for x, y in batches:  # no zero_grad, and an evaluation with gradients in between
        output = net(x)
        net.eval()
        assert net(x).requires_grad
        net.train()
        functional.cross_entropy(output, y).backward()
        optimizer.step()
        with torch.no_grad():
            net(x)
    assert engine.steps_taken == 6
    assert close(weights(net), wanted)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("captured", [False, True])
def test_gradients_that_are_kept_never_show_the_sums_of_the_next_batch(captured, reduction):
    """An optimizer or a logger may keep them, and the sums of the next batch have no noise yet."""
    engine, net, optimizer, batches = start(loss_reduction=reduction)

    def loss(x, y):
        return functional.cross_entropy(net(x), y, reduction=reduction)

    def seen(optimizer, args, kwargs):
        pairs.extend((p.grad, p.grad.clone()) for p in net.parameters())

    def unchanged():
        return all(torch.equal(kept, copy) for kept, copy in pairs)

    pairs, losses = [], []
    optimizer.register_step_post_hook(seen)
    step = engine.step_function(loss) if captured else None
    for x, y in batches:
        if step is not None:
            losses.append(step(x, y))
        else:
            optimizer.zero_grad()
            loss(x, y).backward()
            engine._own_sums.clipper.collect()  # sums without noise
            assert unchanged()
            optimizer.step()
        assert unchanged()
    assert len(pairs) == 6 * len(list(net.parameters()))
    assert len({float(value) for value in losses}) == len(losses)


def test_what_is_not_one_batch_is_refused():
    engine, net, optimizer, batches = start()
    found = iter(batches)
    for _ in range(2):
        x, y = next(found)
        functional.cross_entropy(net(x), y).backward()
    with pytest.raises(ValueError, match=r"step 0 must be taken on its own batch"):
        optimizer.step()
    x, y = next(iter(batches))
    for _ in range(2):
        functional.cross_entropy(net(x), y).backward()
    with pytest.raises(
        ValueError, match=r"examples of its batch, each once, but 20 are in the sum"
    ):
        optimizer.step()
    with pytest.raises(ValueError, match=r"each once, but 0 are in the sum"):
        optimizer.step()
    assert engine.steps_released == 0
    epoch(net, optimizer, batches)
    assert engine.steps_taken == 6


def test_frozen_parameters_stay():
    net = model()
    net[0].requires_grad_(False)
    before = net[0].weight.clone()
    optimizer = torch.optim.SGD(net[3].parameters(), lr=0.1)
    made = private(PrivacyEngine(key=KEY), net=net, optimizer=optimizer)
    epoch(*made)
    assert torch.equal(before, net[0].weight)


@pytest.mark.parametrize(
    ("options", "net", "message"),
    [
        ({}, nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), "BatchNorm1d"),
        ({"batch_first": False}, None, "first dimension"),
        ({"clipping": "per_layer", "max_grad_norm": [1.0] * 4}, None, "clips all layers together"),
    ],
)
def test_what_it_cannot_take_is_refused_by_name_and_left_to_opacus_by_default(
    options, net, message
):
    net = model() if net is None else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=f"'one_pass' cannot take this model: .*{message}"):
        private(
            PrivacyEngine(key=KEY), net=net, optimizer=optimizer, grad_sample_mode="one_pass",
            **options,
        )  # fmt: skip
    if "BatchNorm1d" not in message:
        made = private(PrivacyEngine(key=KEY), net=net, optimizer=optimizer, **options)
        assert made[0] is not net


def test_a_loss_that_is_no_mean_over_examples_is_refused():
    engine, net, *_ = start()
    x, y = dataset()[:10]

    def by_weight(x, y):  # as a mean over the tokens of a batch is
        lengths = 1.0 + x[:, 0].abs()
        found = functional.cross_entropy(net(x), y, reduction="none")
        return (lengths * found).sum() / lengths.sum()

    def mean(x, y):
        return functional.cross_entropy(net(x), y)

    engine.check_loss(mean, x, y)
    for wrong in (by_weight, lambda x, y: 2.0 * mean(x, y) * len(x)):
        with pytest.raises(ValueError, match="the loss must be the mean over the examples"):
            engine.check_loss(wrong, x, y)
        with pytest.raises(ValueError, match="the loss must be the mean over the examples"):
            engine.step_function(wrong)(x, y)
    assert engine.steps_released == 0


RARE = torch.tensor([1.0, 9.0])  # weights of classes


def test_a_step_function_checks_a_loss_with_its_first_piece_of_several_examples():
    """One example has nothing to be compared with, which must not be the end of it."""
    engine, net, *_ = start()
    step = engine.step_function(lambda x, y: functional.cross_entropy(net(x), y.roll(1)), size=8)
    x, y = dataset()[:8]
    step._piece([x[:1], y[:1]])
    with pytest.raises(ValueError, match="the loss must be the mean over the examples"):
        step._piece([x, y])


def test_a_step_function_ends_with_its_run():
    engine, net, _, batches = start()
    step = engine.step_function(lambda x, y: functional.cross_entropy(net(x), y))
    pairs = iter(batches)
    step(*next(pairs))
    engine.close()
    before = weights(net)
    with pytest.raises(ValueError, match=r"steps must be taken before engine\.close\(\)"):
        step(*next(pairs))
    with pytest.raises(ValueError, match=r"steps must be taken before engine\.close\(\)"):
        engine.step_function(functional.cross_entropy)
    assert close(weights(net), before, 0.0)


@pytest.mark.parametrize("mode", ["one_pass", "hooks"])
def test_a_loss_of_one_example_is_not_taken_for_checked(mode):
    engine = PrivacyEngine(key=KEY)
    net, _, batches = private(engine, grad_sample_mode=mode)

    def weighted(x, y):
        return functional.cross_entropy(net(x), y, RARE)

    x, y = next(iter(batches))
    for count in (0, 1):
        with pytest.raises(ValueError, match=f"at least 2 examples, got {count}"):
            engine.check_loss(weighted, x[:count], y[:count])
    with pytest.raises(ValueError, match="weights of classes"):
        weighted(x, y).backward()


def started(net, reduction="mean"):
    engine = PrivacyEngine(key=KEY)
    private(engine, net=net, grad_sample_mode="one_pass", loss_reduction=reduction)
    return engine


def head(outputs, *, zero):
    torch.manual_seed(3)
    net = nn.Linear(12, outputs)
    for param in net.parameters() if zero else ():
        nn.init.zeros_(param)
    return net


def labels(*rare):
    """Of 20 examples: all alike but these."""
    y = torch.zeros(20, dtype=torch.long)
    y[list(rare)] = 2
    return y


def by_class(net, x, y):
    return functional.cross_entropy(net(x), y, weight=torch.tensor([1.0, 1.0, 20.0]))


def signs():
    return 1.0 - 2.0 * (torch.arange(20) % 2)


@pytest.mark.parametrize(
    ("outputs", "loss", "y", "zero"),
    [
        (3, by_class, labels(9), False),  # the first four are alike
        (3, by_class, labels(1, 2), True),
        (1, lambda net, x, y: functional.mse_loss(net(x), y), signs(), True),  # (n, 1) against (n,)
    ],
    ids=["the same labels first", "the same losses", "all pairs"],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_whose_value_hides_that_it_mixes_examples_is_refused(outputs, loss, y, zero):
    net, x = head(outputs, zero=zero), dataset()[:20][0]
    engine, before = started(net), weights(net)
    for call in (
        lambda: engine.check_loss(lambda x, y: loss(net, x, y), x, y),
        lambda: engine.step_function(lambda x, y: loss(net, x, y))(x, y),
    ):
        with pytest.raises(ValueError, match="the loss must be the mean over the examples"):
            call()
    assert engine.steps_released == 0
    assert torch.equal(weights(net), before)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("y", [labels(), labels(9), labels(1, 2)])
@pytest.mark.parametrize(
    ("outputs", "loss", "reduction"),
    [
        (3, lambda o, y: functional.cross_entropy(o, y), "mean"),
        (3, lambda o, y: functional.cross_entropy(o, y, reduction="sum"), "sum"),
        (3, lambda o, y: functional.cross_entropy(o, y, label_smoothing=0.1), "mean"),
        (1, lambda o, y: functional.mse_loss(o, y[:, None].float()), "mean"),
        (1, lambda o, y: functional.l1_loss(o[:, 0], y.float(), reduction="sum"), "sum"),
    ],
)
def test_a_loss_that_adds_up_those_of_examples_is_accepted(outputs, loss, reduction, y, zero):
    net, x = head(outputs, zero=zero), dataset()[:20][0]
    engine, batches = PrivacyEngine(key=KEY), DataLoader(TensorDataset(x, y), batch_size=10)
    _, _, batches = private(
        engine, net=net, data_loader=batches, grad_sample_mode="one_pass", loss_reduction=reduction
    )
    engine.check_loss(lambda x, y: loss(net(x), y), x, y)
    step = engine.step_function(lambda x, y: loss(net(x), y))
    step(*next(iter(batches)))
    assert engine.steps_taken == 1
    other = {"mean": "sum", "sum": "mean"}[reduction]
    with pytest.raises(ValueError, match=f"must be the {other} over the examples"):
        started(net, other).check_loss(lambda x, y: loss(net(x), y), x, y)


def test_losses_of_tokens_are_means_within_each_example():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(11, 6, sparse=True), nn.Linear(6, 11))
    tokens = torch.randint(1, 11, (30, 8))
    tokens[17, 2:] = 0  # the one example that is shorter

    def shares(tokens):
        kept = (tokens != 0).float()
        return functional.cross_entropy(net(tokens).mT, tokens, reduction="none") * kept, kept

    def within(tokens):
        losses, kept = shares(tokens)
        return (losses.sum(1) / kept.sum(1)).mean()

    def over_all(tokens):
        losses, kept = shares(tokens)
        return losses.sum() / kept.sum()

    check_loss(net, within, [tokens], mean=True)
    with pytest.raises(ValueError, match="a mean over all tokens of a batch is none"):
        check_loss(net, over_all, [tokens], mean=True)


def test_weights_of_single_examples_are_looked_at():
    net, (x, y) = head(2, zero=True), dataset()[:40]
    weight = torch.ones(40)
    weight[23] = 30.0

    def weighted(x, y, weight, *, by_sum):
        losses = functional.cross_entropy(net(x), y, reduction="none") * weight
        return losses.sum() / weight.sum() if by_sum else losses.mean()

    check_loss(net, lambda *b: weighted(*b, by_sum=False), [x, y, weight], mean=True)
    with pytest.raises(ValueError, match="must be the mean over the examples"):
        check_loss(net, lambda *b: weighted(*b, by_sum=True), [x, y, weight], mean=True)


class Checkpointed(nn.Module):
    """By torch's first kind of checkpoints, which has no ``autograd.grad``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(12, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.last(checkpoint(torch.tanh, self.first(x), use_reentrant=True))


def test_losses_through_reentrant_checkpoints_are_compared_by_their_gradients():
    """The losses of these examples are equal, so that they alone would show nothing."""
    net, x, y = Checkpointed(), torch.zeros(8, 12), torch.arange(8) % 2
    x[:, 0] = torch.arange(8)
    nn.init.zeros_(net.last.weight)
    nn.init.zeros_(net.last.bias)
    grads = [torch.ones_like(param) for param in net.parameters()]
    for param, grad in zip(net.parameters(), grads, strict=True):
        param.grad = grad
    check_loss(net, lambda x, y: functional.cross_entropy(net(x), y), [x, y], mean=True)
    weight = torch.tensor([1.0, 9.0])
    with pytest.raises(ValueError, match="the gradient of 8 examples differs"):
        check_loss(net, lambda x, y: functional.cross_entropy(net(x), y, weight), [x, y], mean=True)
    for param, grad in zip(net.parameters(), grads, strict=True):
        assert param.grad is grad
        assert torch.equal(grad, torch.ones_like(grad))


def test_checking_a_loss_leaves_no_trace():
    net = model(dropout=0.5)
    engine, (x, y) = started(net), dataset()[:20]
    output = functional.cross_entropy(net(x), y)
    before, state = weights(net), torch.get_rng_state()

    def loss(x, y):
        return functional.cross_entropy(net(x + 0 * torch.randn_like(x)), y)

    engine.check_loss(loss, x, y)
    with pytest.raises(ValueError, match="must be the mean"):
        engine.check_loss(lambda x, y: len(x) * loss(x, y), x, y)
    assert all(param.grad is None for param in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weights(net), before)
    assert all(part.training for part in net.modules())
    output.backward()  # the graph of before is still valid


def test_losses_are_compared_where_there_is_no_gradient():
    net, (x, y) = head(2, zero=False), dataset()[:20]
    whole = torch.ones(7)  # not of examples
    net.register_parameter("unused", nn.Parameter(torch.zeros(3)))
    for start in (lambda: 0.0, lambda: 0.0 * net(x).sum()):
        check_loss(net, lambda x, y, _, s=start: x.square().mean() + s(), [x, y, whole], mean=True)
        with pytest.raises(ValueError, match="that of 8 examples is"):
            check_loss(
                net, lambda x, y, _, s=start: x.square().sum() + s(), [x, y, whole], mean=True
            )
    for count in (0, 1):
        with pytest.raises(ValueError, match=f"at least 2 examples, got {count}"):
            check_loss(net, lambda x, _: net(x).mean(), [x[:count], y[:count]], mean=True)


@pytest.mark.parametrize("kind", ["autocast", "bfloat16", "computed again", "recurrent"])
def test_losses_of_all_kinds_of_models_are_looked_at(kind):
    x, y = dataset()[:20]
    net = model()
    run = net
    if kind == "bfloat16":
        net, x = net.bfloat16(), x.bfloat16()
    elif kind == "computed again":
        run = lambda x: checkpoint(net, x.clone().requires_grad_(), use_reentrant=True)  # noqa: E731
    elif kind == "recurrent":
        net = nn.GRU(3, 2, 2, dropout=0.5, batch_first=True)
        run = lambda x: net(x.unflatten(1, (4, 3)))[0][:, -1]  # noqa: E731

    def loss(x, y, weight=None):
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            return functional.cross_entropy(run(x).float(), y, weight=weight)

    check_loss(net, loss, [x, y], mean=True)
    with pytest.raises(ValueError, match="must be the mean"):
        check_loss(net, lambda x, y: loss(x, y, torch.tensor([1.0, 9.0])), [x, y], mean=True)


@pytest.mark.usefixtures("all_digits")
class TestWholeModels:
    """Whole models, small, against a loop over the examples."""

    def test_wide_resnet(self, monkeypatch):
        monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        from step_models import wide_resnet

        torch.manual_seed(0)
        net, x = wide_resnet(depth=10, widen=1), torch.randn(4, 3, 16, 16)

        def loss(net, x):
            return functional.cross_entropy(net(x), torch.ones(len(x), dtype=torch.long))

        self.sizes(net, x, loss, 0.5)

    @staticmethod
    def sizes(net, x, loss, clip):
        params = [p for p in net.parameters() if p.requires_grad]
        net.eval()  # no dropout: the loop would draw other numbers
        wanted = clipped_sums(lambda i: loss(net, x[i : i + 1]), params, len(x), clip)
        clipper = Clipper(net, params, clip)
        loss(net, x).backward()
        got = clipper.sums()
        flat = [torch.cat([g.reshape(-1) for g in some]) for some in (got, wanted)]
        assert float(flat[1].norm()) > 0.3 * clip
        assert close(*flat, share=1e-5)

    def test_bert(self):
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=40, num_labels=3,
        )  # fmt: skip
        net = transformers.BertForSequenceClassification(config)
        x = torch.randint(0, 50, (5, 9))
        self.sizes(net, x, lambda net, x: functional.cross_entropy(net(x).logits, x[:, 0] % 3), 0.5)

    def test_gpt2(self):
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=40, n_positions=16, n_embd=24, n_layer=2, n_head=2
        )
        net = transformers.GPT2LMHeadModel(config)
        x = torch.randint(0, 40, (4, 10))

        def loss(net, x):
            logits = net(x, use_cache=False).logits
            return functional.cross_entropy(logits[:, :-1].transpose(1, 2), x[:, 1:])

        self.sizes(net, x, loss, 0.5)

    def test_vision_transformer(self):
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        config = transformers.ViTConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40,
            image_size=16, patch_size=8, num_labels=3,
        )  # fmt: skip
        net = transformers.ViTForImageClassification(config)
        x = torch.randn(4, 3, 16, 16)

        def loss(net, x):
            return functional.cross_entropy(net(x).logits, torch.ones(len(x), dtype=torch.long))

        self.sizes(net, x, loss, 0.5)
