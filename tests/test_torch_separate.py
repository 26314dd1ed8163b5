"""Models that mix examples are refused in every mode, and nothing is released."""

from __future__ import annotations

import copy

import pytest
import torch
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset
from training import KEY, loader, model, private, weights

from corrnoise.torch import PrivacyEngine
from corrnoise.torch.clipping.clipper import Clipper
from corrnoise.torch.clipping.reference import clipped_sums

COUNT, WIDTH = 12, 6


class Changed(nn.Module):
    """A network with something between its layers."""

    def __init__(self, between=lambda part, h: h, *, zero=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 3)
        self.between = between
        if zero:
            nn.init.zeros_(self.last.weight)

    def forward(self, x):
        return self.last(self.between(self, self.first(x)).tanh())


def normalised(_, h):
    return functional.batch_norm(h, None, None, training=True)


def of_earlier(_, h):
    """Each row without the mean of those before it."""
    before = torch.cat([torch.zeros_like(h[:1]), h.cumsum(0)[:-1]])
    return h - before / torch.arange(len(h)).clamp(min=1)[:, None]


def beside_noise(part, h):
    return normalised(part, h + 0.02 * torch.randn_like(h)) if part.training else h


def shared(_, h):
    """A mean of the batch, which a later layer gets as one row for all."""
    return h + h.mean(0, keepdim=True)


def kept(part, h):
    """In a plain attribute, of which no ``state_dict`` knows."""
    part.mean = 0.9 * getattr(part, "mean", 0.0) + 0.1 * h.detach().mean(0)
    return h - part.mean


def of_the_largest(_, h):
    return h / h.abs().max()


class Flat(Changed):
    def forward(self, x):
        return super().forward(x).flatten()


class Sorted(Changed):
    """Rows in another order between the layers, and back again."""

    def forward(self, x):
        order = x[:, 0].argsort()
        h = self.last(self.first(x)[order].tanh())
        return h[order.argsort()]


class WithLoss(Changed):
    """Gives nothing but a loss."""

    def forward(self, x):
        return super().forward(x).square().mean()


class Statistics(nn.Module):
    """Layers of torch's that keep statistics, without trained parameters."""

    def __init__(self, layer):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(WIDTH, 8), layer, nn.Linear(8, 3)
        layer.requires_grad_(False)

    def forward(self, x):
        h = self.first(x)
        return self.last(self.layer(h[:, :, None])[:, :, 0] if h.dim() == 2 else h)


class Written(Changed):
    """Puts what it sees into a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        h = self.first(x)
        if self.training:
            self.mean.copy_(h.detach().mean(0) + 0.1 * torch.randn(8))
        return self.last(h)


class Places(nn.Module):
    """A table of positions, of which there are as many as examples."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.last = (
            nn.Embedding(9, 4),
            nn.Embedding(COUNT, 4),
            nn.Linear(4, 3),
        )

    def forward(self, x):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        return self.last(h.tanh().mean(1))


MIXING = {
    "zero head": lambda: Changed(normalised, zero=True),
    "earlier rows": lambda: Changed(of_earlier),
    "the largest": lambda: Changed(of_the_largest),
    "beside noise": lambda: Changed(beside_noise),
    "one row for all": lambda: Changed(shared),
    "flat output": lambda: Flat(normalised),
    "a loss alone": lambda: WithLoss(normalised),
    "sorted": Sorted,
    "plain attribute": lambda: Changed(kept),
    "a buffer": Written,
    "frozen BatchNorm": lambda: Statistics(nn.BatchNorm1d(8)),
    "BatchNorm without weights": lambda: Statistics(nn.BatchNorm1d(8, affine=False)),
    "statistics of InstanceNorm": lambda: Statistics(
        nn.Sequential(
            nn.Unflatten(1, (4, 2)),
            nn.Flatten(2),
            nn.InstanceNorm1d(4, track_running_stats=True),
            nn.Flatten(1),
            nn.Unflatten(1, (8, 1)),
        )
    ),
}
MODES = ("auto", "hooks", "functorch", "ew", "per_layer", "secure")


def data(tokens=False):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(COUNT, WIDTH, generator=generator)
    if tokens:
        x = torch.randint(9, (COUNT, COUNT), generator=generator)
    return TensorDataset(x, torch.randint(3, (COUNT,), generator=generator))


def started(net, mode, batch=None, **more):
    options = {"grad_sample_mode": mode}
    if mode == "per_layer":
        count = sum(p.requires_grad for p in net.parameters())
        options = {"clipping": "per_layer", "max_grad_norm": [1.0] * count}
    if mode == "secure":
        options = {}
    engine = PrivacyEngine(key=KEY, secure_mode=mode == "secure")
    batch = data() if batch is None else batch
    trained = [param for param in net.parameters() if param.requires_grad]
    made = private(
        engine,
        net=net,
        optimizer=torch.optim.SGD(trained, lr=0.1),
        data_loader=DataLoader(batch, batch_size=COUNT),
        **options,
        **more,
    )
    return engine, made


def steps(engine, made, count=2):
    net, optimizer, batches = made
    while engine.steps_taken < count:
        for x, y in batches:
            optimizer.zero_grad()
            output = net(x)
            if output.dim():
                output = functional.cross_entropy(output.view(len(x), 3), y)
            output.backward()
            optimizer.step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", MIXING)
def test_models_that_mix_examples_are_refused_in_every_mode(kind, mode):
    net = MIXING[kind]()
    before, mean = weights(net), getattr(net, "mean", None)
    with pytest.raises(ValueError, match=r"apart|buffers|must do the same|cannot take"):
        steps(*started(net, mode))
    assert torch.equal(before, weights(net))
    if kind == "a buffer":
        assert torch.equal(net.mean, mean)


class Random(Changed):
    """Stochastic depth, noise and a table of positions: nothing mixes examples."""

    def __init__(self):
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.3), nn.GroupNorm(2, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.table = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x):
        self.calls += 1.0
        h = self.first(x)
        depth = (torch.rand(()) > 0.2).float()
        h = h + depth * self.drop(self.norm(h)) * (1.0 + 0.1 * torch.rand_like(h))
        return self.last((h + self.table).tanh())


class Recurrent(nn.Module):
    """With positions before examples inside of an LSTM."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.last = layer, nn.Linear(6, 3)

    def forward(self, x):
        steps = x.unflatten(1, (2, 3)).repeat(1, 1, 2)
        if isinstance(self.layer, DPMultiheadAttention):
            return self.last(self.layer(steps, steps, steps)[0].mean(1))
        return self.last(self.layer(steps.transpose(0, 1))[0][-1])


class Growing(Changed):
    """A buffer that becomes longer with what it saw, a count, and inputs changed in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("turns", torch.zeros(1), persistent=False)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if len(self.turns) < WIDTH:
            self.turns = torch.linspace(0.0, 1.0, WIDTH)
        x = x.clone() if torch.is_grad_enabled() else x.sub_(0.1)
        return super().forward(x + self.turns) * (1.0 + 0.1 * self.calls)


class Again(Changed):
    """Calls itself for what it does not train on."""

    def forward(self, x, inner=False):
        out = super().forward(x)
        if not inner and torch.is_grad_enabled():
            with torch.no_grad():
                aim = self(x, inner=True)
            out = self.last(self.first(x + aim.mean(1, keepdim=True)))
        return out


APART = {
    "growing": Growing,
    "called by itself": Again,
    "plain": Changed,
    "one layer": lambda: nn.Linear(WIDTH, 3),
    "a zero head": lambda: Changed(zero=True),
    "random": Random,
    "evaluation": lambda: Statistics(nn.BatchNorm1d(8)),
    "Opacus's LSTM": lambda: Recurrent(DPLSTM(6, 6)),
    "Opacus's attention": lambda: Recurrent(DPMultiheadAttention(6, 2, batch_first=True)),
}


@pytest.mark.parametrize("mode", ["auto", "hooks", "functorch", "secure"])
@pytest.mark.parametrize("kind", APART)
def test_models_that_treat_examples_apart_are_taken(kind, mode):
    net = APART[kind]()
    if kind == "called by itself" and mode != "auto":
        pytest.skip("Opacus's hooks take no second call")
    if kind == "evaluation":
        if mode == "auto":
            mode = "hooks"  # in one pass there is no such layer at all
        net.layer.train = lambda _=True: net.layer
        net.layer.eval()
        net.layer.training = False
    engine, made = started(net, mode)
    steps(engine, made)
    assert engine.steps_released == 2


class Valid(Changed):
    """Outputs of the tokens alone that are no padding: here as many as there are examples."""

    def forward(self, x, lengths):
        tokens = super().forward(x[:, None].expand(-1, 4, -1) * torch.arange(4.0)[:, None])
        return tokens[torch.arange(4) < lengths[:, None]]


def test_outputs_without_padding_are_no_rows_of_examples():
    net = Valid()
    clipper = Clipper(net, list(net.parameters()), 1.0)
    x, lengths = data().tensors[0], 1 + 2 * (torch.arange(COUNT) % 2)  # 24 tokens of 12 examples
    net(x, lengths).square().mean().backward()
    clipper.sums()
    assert clipper.examples == COUNT


class Lengths(Changed):
    """Takes sorted lengths alone, or none of a model's own mistakes."""

    def forward(self, x, lengths):
        if lengths is None:
            raise RuntimeError("a mistake")
        if (lengths[1:] > lengths[:-1]).any():
            raise RuntimeError("lengths must be sorted")
        return super().forward(x * lengths[:, None])


def test_a_model_that_cannot_run_on_other_batches_is_told_why_it_must():
    net = Lengths()
    Clipper(net, list(net.parameters()), 1.0)
    x = data().tensors[0]
    with pytest.raises(
        ValueError, match=r"raises RuntimeError: lengths must be sorted\. Give what"
    ):
        net(x, torch.arange(COUNT, 0, -1))
    with pytest.raises(RuntimeError, match=r"^a mistake$"):
        net(x, None)


class Stops(Changed):
    """Is interrupted once, in a run on a few examples."""

    left = 1

    def forward(self, x):
        if len(x) == 2 and self.left:
            self.left -= 1
            raise KeyboardInterrupt
        return super().forward(x)


@pytest.mark.parametrize("mode", ["auto", "hooks"])
def test_a_check_that_was_interrupted_is_made_again(mode):
    net = Stops()
    engine, made = started(net, mode)
    with pytest.raises(KeyboardInterrupt):
        steps(engine, made)
    net.left = 0
    steps(engine, made)
    assert engine.steps_released == 2


@pytest.mark.parametrize("mode", ["auto", "hooks"])
@pytest.mark.parametrize("first", ["evaluation", "equal rows"])
def test_a_first_batch_that_shows_nothing_does_not_end_the_check(first, mode):
    net = Changed(beside_noise)
    engine, made = started(net, mode)
    x = data().tensors[0]
    if first == "evaluation":
        net.eval()
        made[0](x)
        net.train()
    else:
        net.between = lambda part, h: h
        made[0](torch.zeros_like(x)).mean().backward()
        net.between = beside_noise
    made[1].zero_grad()
    with pytest.raises(ValueError, match="apart"):
        steps(engine, made)
    assert engine.steps_released == 0


def test_layers_in_training_mode_inside_a_model_in_evaluation_mode_are_looked_at():
    net = Changed(normalised)
    engine, made = started(net, "hooks")
    net.eval()
    net.last.train()
    with pytest.raises(ValueError, match="apart"):
        steps(engine, made)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_the_model_itself_may_be_called_instead_of_its_wrapper(mode):
    net = Changed()
    engine, made = started(net, mode)
    with torch.no_grad():
        copy.deepcopy(net)(data().tensors[0])
    steps(engine, (net, *made[1:]))
    assert engine.steps_released == 2


@pytest.mark.parametrize("mode", ["auto", "hooks", "functorch"])
def test_as_many_positions_as_examples_are_no_examples(mode):
    with pytest.raises(ValueError, match="'places' must see one row for each"):
        steps(*started(Places(), mode, data(tokens=True)))


def test_one_position_at_first_and_as_many_as_examples_later_are_refused():
    net = Places()
    clipper = Clipper(net, list(net.parameters()), 1.0)
    x = data(tokens=True).tensors[0]
    for size in (1, 1):
        net(x[:, :size]).square().mean().backward()
        clipper.sums()
        clipper.drop()
    with pytest.raises(ValueError, match="'places' must see one row for each"):
        net(x)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("mode", ["auto", "hooks", "ew"])
def test_embeddings_with_a_largest_norm_are_refused_before_they_change(kind, mode):
    """Frozen ones too: the forward pass scales rows of the tokens that examples have."""
    net = nn.Sequential(kind(9, 4, max_norm=0.1).requires_grad_(False), nn.Linear(4, 3))
    before = net[0].weight.clone()
    with pytest.raises(ValueError, match=r"must not have max_norm, got 0\.1 in '0'"):
        started(net, mode, data(tokens=True))
    assert torch.equal(net[0].weight, before)


def test_rows_for_padding_are_refused_where_they_would_be_trained():
    net = nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"must not have padding_idx .*'ew', got 0 in '0'"):
        started(net, "ew", data(tokens=True))


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_a_step_of_the_optimizer_inside_is_refused(mode):
    """Its gradients are neither clipped nor noisy."""
    net = model()
    inside = torch.optim.SGD(net.parameters(), lr=1.0)
    engine = PrivacyEngine(key=KEY)
    wrapped, optimizer, batches = private(engine, net=net, optimizer=inside, grad_sample_mode=mode)
    before = weights(net)
    x, y = next(iter(batches))
    functional.cross_entropy(wrapped(x), y).backward()
    with pytest.raises(ValueError, match="that of the optimizer that make_private returned"):
        inside.step()
    assert torch.equal(weights(net), before)
    assert engine.steps_released == 0
    for x, y in batches:  # the returned one goes on
        optimizer.zero_grad()
        functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    assert engine.steps_taken == 6
    engine.close()
    with pytest.raises(ValueError, match="taken before engine"):
        inside.step()  # a loop that goes on by mistake has no noise any more


@pytest.mark.parametrize("mode", ["one_pass", "hooks", "functorch", "ew"])
@pytest.mark.parametrize("parts", [False, True])
def test_several_calls_in_one_backward_pass_are_refused(mode, parts):
    net = model()
    engine = PrivacyEngine(key=KEY)
    wrapped, optimizer, batches = private(engine, net=net, grad_sample_mode=mode)
    x, y = next(iter(batches))

    def work():
        second = net[3](net[0](x.roll(1, 0)).relu()) if parts else wrapped(x.roll(1, 0))
        losses = [functional.cross_entropy(wrapped(x), y)]
        losses.append(functional.cross_entropy(second, y.roll(1, 0)))
        sum(losses).backward()
        optimizer.step()

    with pytest.raises(ValueError, match=r"called once for each backward pass|a call from outside"):
        work()
    assert engine.steps_released == 0


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_a_loop_left_between_forward_and_backward_can_begin_again(mode):
    found = []
    for leaves in (False, True):
        net = model()
        engine = PrivacyEngine(key=KEY)
        wrapped, optimizer, batches = private(engine, net=net, grad_sample_mode=mode)
        if leaves:
            x, y = next(iter(batches))
            functional.cross_entropy(wrapped(x), y)
        for x, y in batches:
            optimizer.zero_grad()
            functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
        assert engine.steps_taken == 6
        found.append(weights(net))
    assert torch.equal(*found)


def test_a_parameter_that_comes_later_gets_no_gradient_in_pieces_of_a_batch():
    net = model()
    net[3].requires_grad_(False)
    optimizer = torch.optim.SGD(net[0].parameters(), lr=1.0)
    engine = PrivacyEngine(key=KEY)
    _, _, batches = private(
        engine, net=net, optimizer=optimizer, data_loader=loader(), max_physical_batch_size=4
    )
    net[3].requires_grad_(True)
    optimizer.add_param_group({"params": list(net[3].parameters())})
    before = weights(net)
    x, y = next(iter(batches))
    functional.cross_entropy(net(x), y).backward()
    with pytest.raises(ValueError, match="must keep the 2 parameters that make_private saw"):
        optimizer.step()
    assert torch.equal(weights(net), before)


class Packed(nn.Module):
    """Packed sequences beside layers that see the examples in the order of the batch."""

    def __init__(self, how="torch"):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.first, self.last = how, nn.Linear(1, 4), nn.Linear(4, 3)
        self.layer = DPLSTM(4, 2, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x):
        h, lengths = self.first(x[:, :, None]).tanh(), (x.abs() > 0.3).sum(1).clamp(min=1)
        if self.how == "hand":
            order = lengths.argsort(descending=True)
            return self.last(self.run(h[order], lengths[order], True)[order.argsort()])
        h = self.run(h, lengths, False)
        if self.how == "twice":
            h = h + self.run(h, WIDTH + 1 - lengths, False)
        return self.last(h.sum(1))

    def run(self, h, lengths, enforce_sorted):
        packed = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=enforce_sorted)
        h = pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=WIDTH)[0]
        return h.sum(1) if enforce_sorted else h


@pytest.mark.parametrize("mode", ["hooks", "functorch", "secure"])
def test_packed_sequences_have_the_gradients_of_their_examples(mode):
    """Each was clipped with the gradients of another example in all other layers."""
    net = Packed()
    same = copy.deepcopy(net)
    _, (net, optimizer, batches) = started(net, mode, noise_multiplier=5e-6)
    x, y = next(iter(batches))
    functional.cross_entropy(net(x), y).backward()
    optimizer.zero_grad()  # what was cleared is forgotten
    functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    wanted = clipped_sums(
        lambda i: functional.cross_entropy(same(x[i : i + 1]), y[i : i + 1]),
        list(same.parameters()), COUNT, 1.0,
    )  # fmt: skip
    for param, total in zip(net.parameters(), wanted, strict=True):
        assert torch.allclose(COUNT * param.grad, total, atol=1e-4)


def test_packed_sequences_of_earlier_steps_must_be_cleared():
    twice = torch.utils.data.ConcatDataset([data(), data()])
    engine, (net, optimizer, batches) = started(Packed(), "hooks", twice, mechanism="dp_sgd")
    order = iter(batches)
    x, y = next(order)
    functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    x, y = next(order)
    functional.cross_entropy(net(x), y).backward()
    with pytest.raises(ValueError, match=r"must be cleared .* call optimizer.zero_grad"):
        optimizer.step()
    assert engine.steps_taken == 1


@pytest.mark.parametrize("mode", ["hooks", "functorch", "secure"])
@pytest.mark.parametrize(("how", "message"), [("hand", "apart"), ("twice", "of one order in each")])
def test_packed_sequences_in_another_order_are_refused(how, message, mode):
    net = Packed(how)
    engine, made = started(net, mode)
    with pytest.raises(ValueError, match=message):
        steps(engine, made)
    assert engine.steps_taken == 0
