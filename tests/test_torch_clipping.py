"""Clipping in one backward pass, against a loop over the examples, for every type of layer."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from corrnoise.torch import PrivacyEngine
from corrnoise.torch.clipping import convolution, gram, handlers, normalisation, parts, products
from corrnoise.torch.clipping.clipper import Clipper
from corrnoise.torch.clipping.parts import Direct, Factors, Outer, Rows, Tied, bound
from corrnoise.torch.clipping.products import full_precision, precision, scaled
from corrnoise.torch.clipping.reference import clipped_sums
from corrnoise.torch.clipping.rounding import _CUT_TO_BFLOAT16, Rounding, matmul_rounding, unit

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"


class Language(nn.Module):
    """Tied weights, rows that the examples share, and one layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 6, padding_idx=3), nn.Embedding(20, 6)
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        z = self.tokens(x) + self.places(torch.arange(x.shape[1])[None])
        z = z + self.layer(z).tanh()
        return self.head(z + self.layer(z).tanh())


class Translation(nn.Module):
    """One table for two languages, of which each has another row for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = (nn.Embedding(11, 6, padding_idx=i) for i in (2, 5))
        self.target.weight = self.source.weight
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(self.source(x) * self.target(x.flip(1)).tanh())


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True, dropout=dropout)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Masked(Attention):
    """One mask for all examples."""

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.inner(x, x, x, attn_mask=mask, need_weights=False)[0]


class Started(nn.Module):
    """A recurrent layer that starts from states of the examples, of which it has two layers."""

    def __init__(self, kind, *, keyword: bool) -> None:
        super().__init__()
        self.inner, self.start = kind(4, 5, num_layers=2, batch_first=True), nn.Linear(4, 10)
        self.keyword = keyword

    def forward(self, x):
        state = self.start(x[:, 0]).unflatten(1, (2, 5)).transpose(0, 1).contiguous()
        state = (state, state.sin()) if isinstance(self.inner, nn.LSTM) else state
        return (self.inner(x, hx=state) if self.keyword else self.inner(x, state))[0]


class Vision(nn.Module):
    """Parameters that belong to no layer inside: the class token and the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.places = nn.Parameter(torch.randn(1, 5, 8))
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        z = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.layer(z + self.places)


class Head(nn.Module):
    """Holds the bias of its last layer too, as the heads of masked language models do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 4)
        self.bias = self.last.bias

    def forward(self, x):
        return self.last(self.first(x).tanh())


class Holding(nn.Module):
    """Parameters in what nobody calls, beside one of its own and a layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))
        self.parts = nn.ParameterDict({"down": torch.randn(6, 2), "up": torch.randn(2, 6)})
        self.shifts = nn.ParameterList([torch.randn(6), torch.randn(6)])
        self.layer = nn.Linear(6, 6)
        self.tied = nn.ParameterList([self.layer.bias])
        self.deep = nn.ModuleDict({"a": nn.ParameterList([torch.randn(6)]), "b": nn.Module()})
        self.deep["b"].gain = nn.Parameter(torch.randn(6))

    def forward(self, x):
        x = (x + self.deep["a"][0]) * self.deep["b"].gain
        z = self.layer(x * self.scale) + x @ self.parts["down"] @ self.parts["up"]
        return (z + self.shifts[0]).tanh() * self.shifts[1] + self.tied[0]


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 4)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        return checkpoint(lambda y: self.second(y.relu()), x, use_reentrant=self.reentrant)


def squared():
    """A layer whose ``forward`` is its own, and not that of its type."""
    layer = nn.Linear(5, 7)
    layer.forward = lambda x: functional.linear(x, layer.weight.square(), layer.bias)
    return layer


def words(*shape):
    return torch.randint(0, 11, shape)


MODELS = {
    "linear": lambda: (nn.Linear(5, 7), torch.randn(6, 5)),
    "linear with another forward": lambda: (nn.Sequential(squared()), torch.randn(6, 5)),
    "linear on sequences, by Gram matrices": lambda: (nn.Linear(50, 70), torch.randn(6, 9, 50)),
    "linear on sequences, by products": lambda: (nn.Linear(5, 7), torch.randn(6, 40, 5)),
    "linear with two dimensions between": lambda: (nn.Linear(5, 7), torch.randn(6, 3, 4, 5)),
    "activation in place": lambda: (
        nn.Sequential(nn.Linear(5, 9), nn.ReLU(inplace=True), nn.LayerNorm(9), nn.Linear(9, 3)),
        torch.randn(6, 4, 5),
    ),
    "convolutions": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.GroupNorm(4, 8),
            nn.Conv2d(8, 16, 3, stride=2, groups=4), nn.InstanceNorm2d(16, affine=True),
            nn.Flatten(), nn.Linear(16 * 9, 5),
        ),
        torch.randn(6, 3, 8, 8),
    ),
    "groups of single numbers": lambda: (
        nn.Sequential(nn.Linear(5, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3)), torch.randn(6, 5),
    ),
    "convolution, dilated and around": lambda: (
        nn.Conv2d(4, 8, (3, 2), padding="same", dilation=2, padding_mode="circular"),
        torch.randn(6, 4, 8, 9),
    ),
    "convolution, one more on one side": lambda: (
        nn.Conv2d(2, 3, 2, padding="same"), torch.randn(4, 2, 5, 6),
    ),
    "convolution, many channels": lambda: (nn.Conv2d(20, 24, 3), torch.randn(4, 20, 5, 5)),
    "convolution of sequences": lambda: (nn.Conv1d(4, 8, 3, 2, dilation=2), torch.randn(6, 4, 18)),
    "convolution of volumes": lambda: (nn.Conv3d(2, 3, 2, padding=1), torch.randn(3, 2, 4, 4, 5)),
    "embedding": lambda: (
        nn.Sequential(nn.Embedding(11, 6, padding_idx=2), nn.RMSNorm(6), nn.Linear(6, 3)),
        words(5, 12),
    ),
    "language model": lambda: (Language(), words(5, 12)),
    "one table with two paddings": lambda: (Translation(), words(5, 12)),
    "attention": lambda: (Attention(), torch.randn(4, 7, 8)),
    "parameters in what nobody calls": lambda: (
        nn.Sequential(nn.Linear(5, 6), Holding(), nn.Linear(6, 3)), torch.randn(5, 4, 5),
    ),
    "encoder of torch": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(4, 7, 8),
    ),
    "parameters of a container": lambda: (Vision(), torch.randn(3, 4, 8)),
    "a bias with two names": lambda: (Head(), torch.randn(6, 6)),
    "no handler": lambda: (
        nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.PReLU()), torch.randn(6, 3, 5, 5),
    ),
    "lstm": lambda: (nn.LSTM(4, 5, batch_first=True), torch.randn(4, 7, 4)),
    "gru": lambda: (nn.GRU(4, 5, num_layers=2, batch_first=True), torch.randn(4, 7, 4)),
    "lstm with states": lambda: (Started(nn.LSTM, keyword=False), torch.randn(4, 7, 4)),
    "gru with states": lambda: (Started(nn.GRU, keyword=True), torch.randn(2, 7, 4)),
    "attention with a mask of the batch's size": lambda: (Masked(), torch.randn(6, 6, 8)),
    "recomputed": lambda: (Recomputed(reentrant=False), torch.randn(5, 6)),
}  # fmt: skip


def value(output):
    """A loss of every example that is not linear in its output."""
    output = output if isinstance(output, torch.Tensor) else output[0]
    count = output[0].numel() if len(output) else 1
    weights = torch.linspace(0.5, 2.0, count, device=output.device)
    return (output.flatten(1) * weights).sin().sum(1)


def norm(tensors):
    return float(torch.cat([t.double().reshape(-1) for t in tensors]).norm())


def compare(model, x, *, mean=True, size=None, clip=None):
    """The sums of one backward pass, beside those of the definition; half of them are clipped."""
    params = [p for p in model.parameters() if p.requires_grad]
    each = [
        norm(clipped_sums(lambda _, j=j: value(model(x[j : j + 1]))[0], params, 1, 1e9))
        for j in range(len(x))
    ]
    clip = clip or sorted(each)[len(x) // 2]
    wanted = clipped_sums(lambda i: value(model(x[i : i + 1]))[0], params, len(x), clip)
    clipper = Clipper(model, params, clip, mean=mean)
    for start in range(0, len(x), size or len(x)):
        found = value(model(x[start : start + (size or len(x))]))
        (found.mean() if mean else found.sum()).backward()
    got = [g.clone() for g in clipper.sums()]
    assert clipper.examples == len(x)
    clipper.recorder.close()
    return wanted, got


@pytest.mark.usefixtures("all_digits")
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_the_definition(name):
    torch.manual_seed(0)
    model, x = MODELS[name]()
    wanted, got = compare(model, x)
    assert norm(a - b for a, b in zip(wanted, got, strict=True)) <= 1e-5 * norm(wanted)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"convolutions"}))
def test_an_empty_batch_adds_nothing(name):
    """Torch itself cannot normalise no pictures; all other models run on none."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    params = list(model.parameters())
    clipper = Clipper(model, params, 1.0)
    for some, count in ((x[:0], 0), (x, len(x)), (x[:0], len(x))):
        found = model(some)
        found = found if isinstance(found, torch.Tensor) else found[0]
        found.flatten(1).sin().sum(1).mean().backward()
        sums = [part.clone() for part in clipper.sums()]
        assert clipper.examples == count
        assert (norm(sums) == 0.0) == (count == 0)
        assert all(param.grad is None for param in params)
    clipper.drop()
    assert norm(clipper.sums()) == 0.0


@pytest.mark.parametrize("name", ["attention", "encoder of torch", "no handler", "lstm", "gru"])
def test_layers_that_run_again_do_so_under_autocast(name):
    """Their inputs are what other layers gave in bfloat16."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    x = x.bfloat16().to(DEVICE)
    params = list(model.to(DEVICE).parameters())

    def losses(rows):
        with torch.autocast(DEVICE, torch.bfloat16):
            output = model(rows)
        return value(output.float() if isinstance(output, torch.Tensor) else output[0].float())

    wanted = clipped_sums(lambda i: losses(x[i : i + 1])[0], params, len(x), 0.5)
    clipper = Clipper(model, params, 0.5)
    losses(x).mean().backward()
    got = clipper.sums()
    assert norm(a - b for a, b in zip(wanted, got, strict=True)) <= 0.03 * norm(wanted)


def test_reentrant_checkpoints_give_the_same_sums():
    torch.manual_seed(0)
    model, x = Recomputed(reentrant=False), torch.randn(5, 6)
    wanted, _ = compare(model, x, clip=0.7)
    model.reentrant = True
    clipper = Clipper(model, list(model.parameters()), 0.7)
    value(model(x)).mean().backward()
    got = clipper.sums()
    assert norm(a - b for a, b in zip(wanted, got, strict=True)) <= 1e-5 * norm(wanted)


@pytest.mark.usefixtures("all_digits")
@pytest.mark.parametrize("name", ["language model", "convolutions", "parameters of a container"])
def test_a_sum_as_loss_and_physical_batches_change_nothing(name):
    torch.manual_seed(1)
    model, x = MODELS[name]()
    wanted, got = compare(model, x, mean=False, size=2)
    assert norm(a - b for a, b in zip(wanted, got, strict=True)) <= 1e-5 * norm(wanted)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 99),
)
def test_norms_of_outer_products_are_those_of_their_sum(examples, positions, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(examples, positions, rows, generator=generator)
    right = torch.randn(examples, positions, columns, generator=generator)
    whole = torch.einsum("bto,bti->boi", left.double(), right.double())
    part = Outer(left, right, torch.Size([rows, columns]))
    wanted = whole.flatten(1).square().sum(1)
    assert torch.allclose(part.norms().squares.sum(1).double(), wanted, rtol=1e-4, atol=1e-5)
    squares, spread = gram.norms(left, right)
    assert torch.allclose(squares.sum(1).double(), wanted, rtol=1e-4, atol=1e-4)
    lengths = (left.norm(dim=2) * right.norm(dim=2)).sum(1).square()
    assert torch.allclose(spread.sum(1), lengths, rtol=1e-4)


def test_gradients_that_cancel_are_counted_with_their_rounding():
    """Two positions that nearly cancel: the norm by Gram matrices alone would be far too small."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 64, bias=False)
    one = torch.randn(1, 1, 64) * 1e3
    x = torch.cat([one, one + 1e-1 * torch.randn(1, 1, 64)], 1)
    back = torch.cat([torch.ones(1, 1, 64), -torch.ones(1, 1, 64)], 1)
    assert added(linear, x, back, clip_norm=1e3) > 1.0
    assert 0.01 < added(linear, x, back) <= 1.0


@pytest.fixture
def arithmetic(request):
    """The type of a model, with the precision of its products where that is float32."""
    kind = getattr(torch, request.param, torch.float32)
    torch.set_float32_matmul_precision("highest" if kind != torch.float32 else request.param)
    yield kind
    torch.set_float32_matmul_precision("highest")


ARITHMETIC = pytest.mark.parametrize(
    "arithmetic", ["highest", "high", "medium", "bfloat16", "float16"], indirect=True
)


@ARITHMETIC
@pytest.mark.parametrize("positions", [2, 64, 300])
@pytest.mark.parametrize("layer", ["linear", "convolution"])
def test_positions_that_cancel_add_no_more_than_the_clip_norm(layer, positions, arithmetic):
    """A Gram matrix of a kernel or of the library, and gradients of their own, in each precision.

    Every other position has the gradient of the one before it but for the sign and a small share.
    """
    torch.manual_seed(0)
    width = 512 if positions > 2 else 64
    signs = torch.ones(positions)
    for share in (0.0, 1e-4, 1e-3, 1e-2, 0.1, 2.0):
        signs[1::2] = share - 1.0
        for equal in (False, True):
            shape = (1, 1, width)
            x, back = (torch.ones(shape) if equal else torch.randn(shape) for _ in range(2))
            x, back = x.expand(1, positions, width), 50.0 * back * signs[None, :, None]
            net = nn.Linear(width, width, bias=False)
            if layer == "convolution":
                net = nn.Conv1d(width, width, 1, bias=False)
                x, back = x.transpose(1, 2), back.transpose(1, 2)
            net, x, back = (each.to(DEVICE, arithmetic) for each in (net, x.contiguous(), back))
            found = added(net, x, back)
            assert found <= 1.0
            assert share < 2.0 or found > 0.95  # where nothing cancels, little is lost


@ARITHMETIC
@pytest.mark.parametrize(
    ("positions", "width"), [(2, 64), (40, 512), (300, 512), (300, 600), (300, 1024), (400, 920)]
)
def test_numbers_that_are_cut_add_no_more_than_the_clip_norm(positions, width, arithmetic):
    """Just below a step of TF32 or bfloat16, where one product rounds up and another one down."""
    for left in (1.0, 1.0 + 2.0**-10 - 2.0**-23, 1.0 + 2.0**-7 - 2.0**-23):
        for right in (left, 1.0 + 2.0**-11 + 2.0**-23):
            net = nn.Linear(width, width, bias=False).to(DEVICE, arithmetic)
            x = torch.full((1, positions, width), left).to(DEVICE, arithmetic)
            back = torch.full((1, positions, width), 16.0 * right).to(DEVICE, arithmetic)
            assert 0.95 < added(net, x, back) <= 1.0


@ARITHMETIC
@pytest.mark.parametrize(
    ("positions", "rows", "columns"), [(8, 128, 64), (40, 256, 256), (300, 1024, 2048)]
)
def test_norms_by_gram_matrices_miss_no_more_than_is_counted(positions, rows, columns, arithmetic):
    """Equal numbers round in one direction; random ones test the indices of tiles."""
    torch.manual_seed(0)
    assert gram.pays(positions, rows, columns, torch.empty(0, device=DEVICE))
    for value in (0.0, 0.1, 0.13, 0.3, 0.45, 0.7, 0.9):
        left, right = torch.randn(2, positions, rows), torch.randn(2, positions, columns)
        if value:
            left, right = torch.full_like(left, value), torch.full_like(right, 1.0 - value / 3)
            left[:, ::3] *= -1.9
        left, right = (each.to(DEVICE, arithmetic) for each in (left, right))
        found = Outer(left, right, torch.Size([rows, columns])).norms()
        whole = left.double().transpose(1, 2) @ right.double()
        exact = whole.flatten(1).norm(dim=1)
        spread = (left.double().norm(dim=2) * right.double().norm(dim=2)).sum(1)
        # R² has four factors, each of which is cut by a step at most; 2.5 of them are counted.
        cut = 4.0 * found.rounding.factors / 2.5
        found_spread = found.spread.sum(1).double()
        assert torch.allclose(found_spread, spread.square(), rtol=max(2e-3, cut))
        assert (bound([found]) >= exact).all()
        if arithmetic != torch.float32:  # matrix units take the factors as they are
            squares = found.squares.sum(1, dtype=torch.float64)
            assert (squares + found.missed * found.spread.sum(1) >= exact.square()).all()


def cancelling(shape, axis, share, kind):
    """Gradients at two positions that are nearly opposite, of random or of equal numbers."""
    one = torch.randn(shape) if kind == "random" else (1.0 + torch.rand(1)).expand(shape)
    return 1e4 * torch.cat([one, (share - 1.0) * one], axis)


@pytest.mark.parametrize("kind", ["random", "equal"])
@pytest.mark.parametrize("layer", ["linear", "wide", "table", "convolution", "views"])
def test_gradients_that_cancel_are_not_lost_in_rounding(layer, kind):
    """Gram matrices that are off by 10⁻⁷ of R² told norms that were up to 10³ times too small."""
    torch.manual_seed(0)
    for share in (1e-4, 3e-4, 1e-3, 3e-3) * 5:
        if layer in ("linear", "wide", "views"):
            width = 1024 if layer == "wide" else 64
            net, x = nn.Linear(width, width, bias=False), torch.randn(1, 1, width).expand(1, 2, -1)
            if kind == "equal":
                x = torch.ones(1, 2, width)
            back = cancelling((1, 1, width), 1, share, kind)
            if layer == "views":
                x, back = x[0][:, None], back[0][:, None]
        elif layer == "table":
            net, x = nn.Embedding(4, 768), torch.zeros(1, 2, dtype=torch.long)
            back = cancelling((1, 1, 768), 1, share, kind)
        else:
            net, x = nn.Conv2d(64, 64, 3, bias=False), (1.0 + torch.rand(1)).expand(1, 64, 3, 4)
            back = cancelling((1, 64, 1, 1), 3, share, kind)
        found = added(net, x.contiguous(), back, views=2 if layer == "views" else 1)
        assert found <= 1.0


@pytest.mark.parametrize("positions", [1, 2, 40])
def test_factors_whose_squares_underflow_are_clipped(positions):
    """Squares of 10⁻²³ are 0 in float32, and the other factor may be as long as 10¹⁹."""
    net, x = nn.Linear(64, 512, bias=False), torch.full((1, positions, 64), 1e18)
    back = torch.full((1, positions, 512), 2.5e-19)
    scale = 1e-4  # of the loss, as a mean over a batch has it
    assert added(net, x, scale * back, clip_norm=1e-4) <= 1e-4


def test_gradients_whose_squares_overflow_add_nothing():
    assert added(nn.Linear(4, 4), torch.ones(1, 4), torch.full((1, 4), 1e19)) == 0.0


def test_a_tied_weight_has_all_terms_of_its_norm_from_the_same_factors():
    """Its gradient as a weight is small enough to be kept, and cancels with that as a table."""
    torch.manual_seed(0)
    size, positions = 4, 1024
    for _ in range(30):
        a, b = (1.0 + torch.rand(2)).tolist()
        outer = Outer(
            torch.full((1, positions, size), a), torch.full((1, positions, size), b),
            torch.Size([size, size]),
        )  # fmt: skip
        values = torch.full(
            (1, size, size), -(1.0 - 0.02 * float(torch.rand(1))) * positions * a * b
        )
        table = Rows(torch.arange(size)[None], values, torch.Size([size, size]))
        part = Tied(table, outer)
        norms = part.norms()
        assert norm([part.weighted(Factors(torch.ones(1))).double()]) <= float(bound([norms]))


def added(net, x, back, clip_norm=1.0, views=1):
    """The norm of what one example adds to the sums, with these gradients of the output."""
    clipper = Clipper(net, list(net.parameters()), clip_norm, mean=False, views=views)
    (net(x) * back).sum().backward()
    found = norm(each.double() for each in clipper.sums())
    clipper.recorder.close()
    return found


@pytest.fixture(params=["high", "medium"])
def low(request):
    """A precision of matrix products with which a processor may cut factors to bfloat16."""
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("positions", "size"), [(1, 40), (9, 40), (40, 5)])
def test_no_example_exceeds_the_clip_norm_in_low_precision(low, positions, size, monkeypatch):
    """The CPU here does not cut factors; others do."""

    def cut(left, right):
        if precision() != "highest":
            left, right = left.bfloat16(), right.bfloat16()
        return left.float() @ right.float()

    for module in (products, parts, convolution):
        monkeypatch.setattr(module, "product", cut)
    torch.manual_seed(0)
    linear, x = nn.Linear(size, size), torch.randn(32, positions, size)
    clipper = Clipper(linear, list(linear.parameters()), 0.5, mean=False)
    for row in x:
        (50.0 * value(linear(row[None]))).sum().backward()
        assert 0.45 < norm(clipper.sums()) <= 0.5
        clipper.drop()
    assert precision() == low


def test_full_precision_is_full_and_leaves_the_setting_as_it_was(low):
    cut = Rounding(_CUT_TO_BFLOAT16, 3.0 * 2.0**-24)
    assert matmul_rounding(torch.ones(1)) == cut
    x = torch.randn(2, 40, 1, 2)
    part = convolution.Convolution(nn.Conv2d(40, 40, 1), x, x)
    assert part.norms().rounding == cut
    with full_precision():
        assert torch.get_float32_matmul_precision() == "highest"
        assert matmul_rounding(torch.ones(1)) == part.norms().rounding == Rounding(2.0**-22)
    assert torch.get_float32_matmul_precision() == low


def test_a_precision_that_torch_cannot_tell_is_refused(monkeypatch):
    def unknown():
        raise RuntimeError("mix of the legacy and new APIs")

    linear = nn.Linear(5, 4)
    clipper = Clipper(linear, list(linear.parameters()), 1.0)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", unknown)
    value(linear(torch.randn(3, 2, 5))).mean().backward()
    with pytest.raises(ValueError, match=r"must be set by torch\.set_float32_matmul_precision"):
        clipper.sums()
    assert clipper.examples == 0


def test_rows_times_their_factors_are_rounded_once():
    torch.manual_seed(0)
    share, kind = 2.0**-8, torch.bfloat16
    rows = (1.0 + 3.0 * torch.rand(300, 7, 40, device=DEVICE)).to(kind)
    factors = 1.0 + torch.rand(300, device=DEVICE)
    found = scaled(rows.transpose(1, 2), factors).transpose(1, 2)
    assert found.dtype == kind
    exact = rows.double() * factors.double()[:, None, None]
    assert ((found.double() - exact).abs() <= share * exact).all()
    assert torch.equal(found, (rows.float() * factors[:, None, None]).to(kind))
    assert unit(SimpleNamespace(is_cuda=True, dtype=kind), "highest") == share  # as it is counted
    twice = rows * factors.to(kind)[:, None, None]
    assert ((twice.double() - exact).abs() > share * exact).any()


def test_float16_is_multiplied_in_float32():
    """Of a clipped gradient of many elements each is below 2⁻¹⁴, where float16 has fewer bits."""
    left, right = (torch.full((1, 300, 512), x, dtype=torch.float16) for x in (16.0, 1.0))
    factors = torch.full((1,), 1.0 / (16.0 * 300 * 512))  # to a norm of 1
    found = Factors(factors.to(DEVICE)).times(right.to(DEVICE)).cpu()
    assert found.dtype == torch.float32
    assert torch.allclose(found, factors)
    for kept, added in ((found, 1.0), (scaled(right, factors), 7.0 * 2.0**-24 / float(factors))):
        whole = (left[0].double().T @ kept[0].double()).norm()
        assert float(whole) == pytest.approx(added, rel=1e-6)
    assert unit(SimpleNamespace(is_cuda=True, dtype=torch.float16), "highest") == 2.0**-10


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_sums_of_convolutions_are_float32(kind):
    """Rounded to the model's type, a sum would change by more than one example can add."""
    torch.manual_seed(0)
    module, x = nn.Conv2d(20, 24, 3), torch.randn(40, 20, 5, 5)
    grads = torch.randn(40, 24, 3, 3)
    part = convolution.Convolution(module, x.to(kind), grads.to(kind))
    factors = Factors(torch.rand(40))
    # As on a GPU, where products of factors are in the model's type.
    factors.times = lambda tensor: scaled(tensor, factors.values)
    found = part.weighted(factors)
    wanted = torch.einsum("n,noikl->oikl", factors.values.double(), part.each().double())
    assert found.dtype == torch.float32
    assert float((found - wanted).norm()) <= 1e-6 * float(wanted.norm())


def test_a_tied_weight_that_cancels_is_counted_with_the_rounding_of_its_cross_term():
    """As a weight its gradients cancel, so that they are far shorter than what they are made of."""
    torch.manual_seed(0)
    examples, rows, columns = 200, 5, 4
    left = 1e4 * torch.randn(examples, 1, rows)
    right = 1e4 * torch.randn(examples, 1, columns)
    outer = Outer(
        torch.cat([left, left, left], 1), torch.cat([right, -0.5 * right, -0.5 * right], 1),
        torch.Size([rows, columns]),
    )  # fmt: skip
    values = torch.randn(examples, 3, columns)
    table = Rows(torch.randint(0, rows, (examples, 3)), values, torch.Size([rows, columns]))
    part = Tied(table, outer)
    found = part.norms()
    assert found.rounding == matmul_rounding(left)
    lengths = (outer.left.norm(dim=2) * outer.right.norm(dim=2)).sum(1) + values.norm(dim=2).sum(1)
    assert (found.spread.sum(1) >= lengths.square()).all()
    true = part.each().double().flatten(1).norm(dim=1)
    assert (bound([found]) >= true).all()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_no_example_exceeds_the_clip_norm_under_autocast(kind):
    torch.manual_seed(0)
    model, x = MODELS["activation in place"]()
    params = list(model.parameters())
    clipper = Clipper(model, params, 0.5)
    for row in x:
        with torch.autocast("cpu", dtype=kind):
            output = model(row[None])
        (50.0 * value(output.float())).mean().backward()
        assert 0.49 < norm(clipper.sums()) <= 0.5
        clipper.drop()


def test_the_model_is_not_changed():
    torch.manual_seed(0)
    model, x = MODELS["convolutions"]()
    names, before = list(model.state_dict()), [p.clone() for p in model.parameters()]
    kinds, output = [type(m) for m in model.modules()], model(x)
    Clipper(model, list(model.parameters()), 1.0)
    again = model(x)
    assert torch.equal(output, again)
    value(again).mean().backward()
    assert names == list(model.state_dict())
    assert kinds == [type(m) for m in model.modules()]
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)
        assert isinstance(new, nn.Parameter)
        assert new.requires_grad
        assert new.grad is None


def test_an_error_in_a_layer_leaves_its_parameters():
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    Clipper(model, list(model.parameters()), 1.0)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 6))
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert len(list(model.parameters())) == 4


class Behind(nn.Module):
    """Examples that lie behind positions in memory, as before recurrent layers."""

    def __init__(self, norm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 4, 1), norm

    def forward(self, x):
        h = self.norm(self.first(x)).flatten(2).permute(2, 0, 1).contiguous()
        return h.tanh().sum(0)


@pytest.mark.parametrize("mode", ["one_pass", "hooks"])
def test_instance_normalisation_keeps_the_gradients_of_examples_apart(mode):
    """Torch's backward pass takes those of other examples in this layout."""
    net, same = Behind(nn.InstanceNorm2d(4, affine=True)), Behind(nn.GroupNorm(4, 4))
    x = torch.randn(6, 3, 4, 4)
    wanted = clipped_sums(lambda i: value(same(x[i : i + 1]))[0], list(same.parameters()), 6, 2.0)
    if mode == "one_pass":
        clipper = Clipper(net, list(net.parameters()), 2.0)
        value(net(x)).mean().backward()
        found = clipper.sums()
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        data = TensorDataset(x, torch.zeros(6))
        with pytest.warns(UserWarning, match="not private"):
            net, optimizer, loader = PrivacyEngine().make_private(
                module=net, optimizer=optimizer, data_loader=DataLoader(data, batch_size=6),
                noise_multiplier=0.0, epochs=1, sampling="fixed", mechanism="dp_sgd",
                max_grad_norm=2.0, grad_sample_mode="hooks",
            )  # fmt: skip
        value(net(next(iter(loader))[0])).mean().backward()
        optimizer.step()
        found = [6 * param.grad for param in net.parameters()]
    for total, right in zip(found, wanted, strict=True):
        assert torch.allclose(total, right, atol=1e-4)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_small_inputs_of_a_norm_have_the_epsilon_of_torch(kind):
    torch.manual_seed(0)
    norm = nn.RMSNorm(6).to(DEVICE, kind)
    x = (1e-3 * torch.randn(1, 4, 6)).to(DEVICE, kind)
    clipper = Clipper(norm, [norm.weight], 1e9)
    value(norm(x).float()).mean().backward()
    (total,) = clipper.sums()
    clipper.recorder.close()
    (wanted,) = torch.autograd.grad(value(norm(x).float()).mean(), norm.weight)
    assert float((total - wanted).norm()) <= 0.02 * float(wanted.norm())


def test_frozen_parameters_cost_and_get_nothing():
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    clipper = Clipper(model, list(model[2].parameters()), 1.0)
    assert [layer.name for layer in clipper.recorder.layers] == ["2"]
    clipper.recorder.close()
    wanted, got = compare(model, torch.randn(6, 5))
    assert norm(a - b for a, b in zip(wanted, got, strict=True)) <= 1e-5 * norm(wanted)


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_a_compiled_model_has_the_same_sums():
    torch.manual_seed(0)
    model, x = MODELS["activation in place"]()
    params = list(model.parameters())
    clipper = Clipper(model, params, 0.3)
    value(model(x)).mean().backward()
    wanted = [g.clone() for g in clipper.sums()]
    clipper.drop()
    value(torch.compile(model, backend="eager")(x)).mean().backward()
    got = clipper.sums()
    assert norm(a - b for a, b in zip(wanted, got, strict=True)) <= 1e-5 * norm(wanted)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x):
        y = self.layer(x)
        return y - y.mean(0)


class MixingInTraining(Mixing):
    """Beside dropout, and not in evaluation."""

    def forward(self, x):
        y = functional.dropout(self.layer(x), 0.3, self.training)
        return y - y.mean(0) if self.training else y


class Remembering(nn.Module):
    """Keeps a mean of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        self.mean += 0.1 * (x.detach().mean(0) - self.mean)
        return self.layer(x)


class Counting(nn.Module):
    """Counts what it saw, in whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += (x > 0).sum()
        return self.layer(x)


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x):
        return functional.linear(self.layer(x), self.layer.weight)


class Computed(nn.Module):
    """Calls its layer with parameters that are twice as large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x):
        twice = {name: 2.0 * param for name, param in self.layer.named_parameters()}
        return torch.func.functional_call(self.layer, twice, (x,))


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x):
        return self.layer(x.flatten(0, 1)).view(*x.shape[:2], 4)


class Relative(nn.Module):
    """A bias for each pair of positions, which all examples share, as T5 has it."""

    def __init__(self, table) -> None:
        super().__init__()
        self.table, self.layer = table, nn.Linear(5, 5)

    def forward(self, x):
        place = torch.arange(x.shape[1])
        bias = self.table((place[:, None] - place[None, :]).abs())
        return (x @ x.transpose(1, 2) + bias.squeeze(2)).softmax(2) @ self.layer(x)


class Elsewhere(nn.Module):
    """A layer with a handler that holds what its parent uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.layer.extra = nn.ParameterDict({"shift": torch.randn(5)})

    def forward(self, x):
        return self.layer(x) + self.layer.extra["shift"]


class Bags(nn.Module):
    """Bags of indices that lie one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(9, 3)

    def forward(self, x):
        starts = torch.arange(len(x)) * x.shape[1]
        return self.table((x > 0).long().flatten(), starts)


class Table(nn.Module):
    """An embedding that has no handler."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 1))

    def forward(self, index):
        return self.weight[index]


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (Mixing(), (6, 5), "must treat the examples of a batch apart"),
        (MixingInTraining(), (6, 5), "must treat the examples of a batch apart"),
        (Remembering(), (6, 5), "must not put what it sees of examples into buffers, but 'mean'"),
        (Counting(), (6, 5), "must not put what it sees of examples into buffers, but 'seen'"),
        (Outside(), (6, 5), "'layer.weight' must be used by its own layer alone"),
        (Elsewhere(), (6, 5), "'layer.extra.shift' must be used by its own layer alone"),
        (Computed(), (6, 5), "'layer' must be called with its own parameters"),
        (Flattened(), (6, 3, 5), "'layer' must see one row for each of the"),
        (Relative(nn.Embedding(9, 1)), (6, 6, 5), "'table' must see .* but for 2 of them alone"),
        (Relative(nn.Embedding(9, 1)), (2, 2, 5), "'table' must see .* but for 1 of them alone"),
        (Relative(Table()), (6, 6, 5), "'table' must see .* but for 2 of them alone"),
        (Attention(dropout=0.5), (4, 7, 8), "set that dropout to 0.*DPMultiheadAttention"),
        (Bags(), (4, 3), "'table' .EmbeddingBag., .* must run again for each example alone"),
        (nn.Embedding(9, 3, max_norm=1.0), (5,), "must not have max_norm"),
    ],
)
def test_what_cannot_be_clipped_is_refused_in_words(model, shape, message):
    torch.manual_seed(0)
    x = torch.randint(0, 9, shape) if isinstance(model, nn.Embedding) else torch.randn(shape)
    clipper = Clipper(model, list(model.parameters()), 1.0)

    def work():
        value(model(x)).mean().backward()
        clipper.sums()

    with pytest.raises(ValueError, match=message):
        work()
    assert clipper.examples == 0


class Kept(nn.Module):
    """A frozen layer in evaluation mode inside a model that is trained, as backbones are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(5), nn.Linear(5, 4)
        self.norm.requires_grad_(False)
        self.register_buffer("steps", torch.zeros(()))

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        self.steps += 1.0  # whatever the examples are
        return self.layer(self.norm(x))


def test_looking_at_a_model_leaves_no_trace():
    model = Kept().train()
    torch.manual_seed(1)
    clipper = Clipper(model, list(model.layer.parameters()), 1.0)
    x = torch.randn(6, 5)
    before = torch.get_rng_state()
    value(model(x)).mean().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert clipper.examples == 0
    assert len(clipper.sums()) > 0
    assert clipper.examples == 6
    assert (float(model.steps), int(model.norm.num_batches_tracked)) == (1.0, 0)
    assert not model.norm.training
    assert model.layer.training


def test_a_handler_of_the_user_is_used():
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4,), 2.0))

        def forward(self, x):
            return x * self.weight

    seen = []

    @handlers.register(Scale)
    def scale(module, inputs, grads, names):
        seen.append(sorted(names))
        return {"weight": Direct(grads[0] * inputs[0])}

    wanted, got = compare(Scale(), torch.randn(6, 4))
    assert norm(a - b for a, b in zip(wanted, got, strict=True)) <= 1e-5 * norm(wanted)
    assert seen == [["weight"]]


@pytest.fixture
def kernels(monkeypatch):
    """Kernels without TF32, run by Triton's interpreter where there is no GPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    if not CUDA:
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("count", "width"), [(3, 5), (1, 1024), (2, 1025), (2, 70_001), (2100, 40), (1, 2**20 + 1)]
)
def test_the_kernel_of_squares_is_never_too_small(count, width):
    torch.manual_seed(0)
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    if not CUDA and (count > 100 or width > 100_000):  # which the interpreter takes long for
        kinds = (torch.bfloat16,)
    for rows in (torch.randn(count, width), torch.full((count, width), 0.1)):
        for some in map(rows.to, kinds):
            exact = some.double().square().sum(1)
            found = products.launch_squares(some.to(DEVICE)).cpu()
            assert found.dtype == torch.float32
            assert (exact <= found).all()
            assert (found <= exact * (1.0 + 2.0**-18)).all()


@pytest.mark.usefixtures("kernels")
def test_squares_that_are_not_finite():
    rows = torch.ones(4, 3000)
    rows[0, 2999], rows[1, 0], rows[2, 5] = torch.inf, torch.nan, 1e30
    with np.errstate(over="ignore"):  # of the interpreter
        found = products.launch_squares(rows.to(DEVICE)).cpu()
    assert found[0] == found[2] == torch.inf
    assert found[1].isnan()
    assert found[3].isfinite()


@pytest.mark.skipif(CUDA, reason="the kernels are interpreted on a machine without a GPU")
@pytest.mark.usefixtures("kernels")
class TestKernels:
    """The kernels, run by Triton's interpreter."""

    def test_gram(self):
        torch.manual_seed(0)
        left, right = torch.randn(2, 140, 9), torch.randn(2, 140, 5)
        found, wanted = gram._fused(left, right), gram.norms(left, right)
        for a, b in zip(found, wanted, strict=True):
            assert torch.allclose(a.sum(1), b.sum(1), rtol=1e-4)

    @pytest.mark.parametrize("kernel", [3, (2, 1)])
    def test_convolution(self, kernel):
        torch.manual_seed(0)
        module = nn.Conv2d(4, 6, kernel, stride=2, padding=1, groups=2)
        x = torch.randn(3, 4, 8, 8)
        part = convolution.Convolution(module, x, torch.randn_like(module(x)))
        wanted = part.each().flatten(1).square().sum(1)
        found = part._fused()
        assert torch.allclose(found.squares.sum(1), wanted, rtol=1e-4)
        assert found.terms == 2 * part.positions

    def test_squares_of_a_convolution_are_never_too_small(self):
        """Of whole numbers, so that the gradient itself is exact."""
        torch.manual_seed(0)
        module = nn.Conv2d(40, 50, 3)
        x = torch.randint(-9, 9, (2, 40, 5, 5)).float()
        part = convolution.Convolution(module, x, torch.randint(-9, 9, (2, 50, 3, 3)).float())
        exact = part.each().double().flatten(1).square().sum(1)
        found = part._fused().squares.sum(1, dtype=torch.float64)
        assert (exact * (1.0 + 2.0**-18) <= found).all()
        assert (found <= exact * (1.0 + 2.0**-15)).all()

    def test_a_gram_matrix_is_lifted_by_what_underflows(self):
        left, right = torch.full((1, 40, 64), 1e18), torch.full((1, 40, 512), 2.5e-23)
        squares, spread = gram._fused(left, right)
        wanted = (left.double().mT @ right.double()).square().sum()
        assert squares.double().sum() >= wanted
        assert spread.double().sum() >= wanted

    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    @pytest.mark.parametrize("kernel", [3, (2, 1)])
    def test_gradients_of_convolutions_with_several_views(self, kernel, layout, monkeypatch):
        torch.manual_seed(0)
        module = nn.Conv2d(4, 6, kernel, stride=2, padding=1, groups=2, dilation=(1, 2))
        x = torch.randn(6, 4, 7, 7).contiguous(memory_format=layout)
        part = convolution.Convolution(module, x, torch.randn_like(module(x)))
        wanted = part.each().unflatten(0, (2, 3)).sum(1)
        for shared in (1 << 12, 0):  # three entries of the kernel at once, or one
            monkeypatch.setattr(convolution, "_SHARED", shared)
            found = part.joined(3)._stored(torch.float32)
            assert torch.allclose(found, wanted, atol=1e-4)
            low = part.joined(3)._stored(torch.bfloat16)
            assert torch.allclose(low.float(), found, rtol=2.0**-7)  # the interpreter cuts

    @pytest.mark.parametrize("last", [False, True])
    def test_a_width_of_1_may_have_any_stride(self, last):
        """Torch leaves it as it was; the kernel must not walk into the next example by it."""
        torch.manual_seed(0)
        module = nn.Conv2d(4, 6, (3, 1), padding=(1, 0))
        x = torch.randn(6, 7, 4).transpose(1, 2)[..., None] if last else (
            torch.randn(6, 4, 1, 7).transpose(2, 3)
        )  # fmt: skip
        layout = torch.channels_last if last else torch.contiguous_format
        assert x.is_contiguous(memory_format=layout)
        assert x.stride(3) != (4 if last else 1)
        grads = torch.randn_like(module(x)).contiguous(memory_format=layout)
        part = convolution.Convolution(module, x, grads)
        wanted = part.each().unflatten(0, (2, 3)).sum(1)
        assert torch.allclose(part.joined(3)._stored(torch.float32), wanted, atol=1e-4)

    def test_what_is_kept_in_bfloat16_is_measured_and_added_as_it_is(self, monkeypatch):
        torch.manual_seed(0)
        module = nn.Conv2d(4, 6, 3, padding=1)
        x = torch.randn(6, 4, 5, 5)
        grads = torch.randn_like(module(x))
        part = convolution.Convolution(module, x.bfloat16(), grads.bfloat16()).joined(3)
        monkeypatch.setattr(convolution.Convolution, "_fits", lambda self: True)
        kept = part.stored()
        assert kept.dtype == torch.bfloat16
        assert part.each().dtype == torch.float32
        norms = part.norms()
        wanted = kept.double().flatten(1).square().sum(1)
        assert torch.allclose(norms.squares.sum(1).double(), wanted, rtol=1e-5)
        assert norms.rounding.factors == norms.lost == 0.0
        factors = torch.tensor([0.3, 2.0])
        wanted = (factors.double().view(-1, 1, 1, 1, 1) * kept.double()).sum(0)
        found = part.weighted(Factors(factors))
        assert found.shape == module.weight.shape
        assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(("count", "width"), [(1, 5), (70, 1300), (257, 512)])
    def test_sums_of_rows_with_factors(self, count, width):
        torch.manual_seed(0)
        rows, factors = torch.randn(count, width).bfloat16(), torch.rand(count)
        wanted = factors.double() @ rows.double()
        found = products.launch_sum(factors, rows)
        assert found.dtype == torch.float32
        assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("centred", [True, False])
    def test_rows(self, centred):
        torch.manual_seed(0)
        x, g = torch.randn(3, 5, 7) + 2.0, torch.randn(3, 5, 7)
        found = normalisation._fused_rows(x, g, (7,), 1e-5, centred)
        wanted = normalisation.rows(x, g, (7,), 1e-5, centred=centred)
        for a, b in zip(found, wanted, strict=True):
            assert torch.allclose(a, b, atol=1e-5)

    def test_channels(self):
        torch.manual_seed(0)
        x, g = torch.randn(3, 8, 5, 5) + 3.0, torch.randn(3, 8, 5, 5)
        found = normalisation._fused_channels(x.flatten(2), g.flatten(2), 4, 1e-5)
        wanted = normalisation.channels(x, g, 4, 1e-5)
        for a, b in zip(found, wanted, strict=True):
            assert torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("views", [1, 2])
def test_every_part_counts_its_additions(views, monkeypatch):
    torch.manual_seed(0)
    module, x = nn.Conv2d(64, 64, 3), torch.randn(2, 64, 3, 4)
    part = convolution.Convolution(module, x, torch.randn_like(module(x))).joined(views)
    found = part.norms()  # by Gram matrices
    monkeypatch.setattr(gram, "pays", lambda *_: False)
    monkeypatch.setattr(convolution, "_KEPT", {"cpu": 0})
    assert (part.norms().terms, part.norms().inner) == (4 * views, 0)
    monkeypatch.undo()
    left, right = torch.randn(2, 5, 40), torch.randn(2, 5, 40)
    outer = Outer(left, right, torch.Size([40, 40]))
    rows = Rows(torch.randint(0, 40, (2, 7)), torch.randn(2, 7, 40), torch.Size([40, 40]))
    by_gram = [*(each.norms() for each in (outer, rows, Tied(rows, outer))), found]
    assert [each.terms for each in by_gram] == [5, 7, 13, 2 * views]
    assert [each.inner for each in by_gram] == [256, 128, 256, 256]
    kept = Outer(left, right[..., :2], torch.Size([40, 2])).norms()
    assert (kept.terms, kept.inner) == (0, 0)


@pytest.mark.parametrize("size", [1, 15, 16, 1000, 2_400_000])
def test_squared_norms_are_never_too_small(size):
    """A float32 sum of so many equal squares, one after the other, misses a share of 10⁻³."""
    torch.manual_seed(0)
    for value in (0.1, 0.13, 0.7, 1e-3, 3e4):
        for rows in (torch.full((1, size), value), value * torch.randn(1, size)):
            for some in (rows, rows.bfloat16(), rows.clamp(-1.0, 1.0).half()):
                some = some.to(DEVICE)  # which adds in another order
                exact = float(some.double().square().sum())
                found = float(products.squared(some))
                assert exact <= found <= exact * (1.0 + 2.0**-18)


def test_squared_norms_of_rows_in_any_layout():
    rows = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5)
    wanted = rows.flatten(1).square().sum(1)
    for some in (rows, rows.transpose(1, 3), rows.movedim(-1, 1)[:, ::2, :, 1:]):
        wanted = some.flatten(1).double().square().sum(1)
        assert torch.allclose(products.squared(some).double(), wanted, rtol=2e-6)
    assert torch.equal(products.squared(torch.zeros(3, 0)), torch.zeros(3))
    assert torch.isinf(products.squared(torch.full((1, 20), 1e30))).all()


class Shared(nn.Module):
    """A table that is also the weight of the last layer, of equal numbers."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 4096), nn.Linear(4096, 50, bias=False)
        self.head.weight = self.table.weight
        nn.init.constant_(self.table.weight, value)

    def forward(self, x):
        return self.head(self.table(x))


@pytest.mark.parametrize("kind", ["linear", "convolution", "tokens", "tied"])
def test_equal_numbers_in_wide_rows_add_no_more_than_the_clip_norm(kind):
    """By Gram matrices; with sums in float32 they exceeded it by up to 2e-5."""
    for value in (0.1, 0.13, 0.3, 0.45, 0.7):
        net, x = {
            "linear": lambda v=value: (nn.Linear(16384, 128, False), torch.full((1, 8, 16384), v)),
            "convolution": lambda v=value: (
                nn.Conv1d(2048, 128, 3, bias=False), torch.full((1, 2048, 4), v)
            ),
            "tokens": lambda: (nn.Embedding(9, 3000), torch.full((1, 40), 3)),
            "tied": lambda v=value: (Shared(v), torch.full((1, 6), 3)),
        }[kind]()  # fmt: skip
        assert 1.0 - 3e-5 < added(net, x, 3e3 * value) <= 1.0


@pytest.mark.parametrize("kind", ["convolution", "not kept", "linear", "embedding", "scales"])
def test_equal_large_gradients_add_no_more_than_the_clip_norm(kind, monkeypatch):
    """Sums of equal numbers round in one direction, step after step.

    Where the gradient is added up twice, for the norm and for the sum, 576 additions in both may
    cost 2·576·2⁻²⁴·R, and R is at most 26/24 of the norm here: less than 10⁻⁴ with the rest.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # its bound is far wider
    twice = kind == "not kept" or (kind == "convolution" and CUDA)
    if kind == "not kept":
        monkeypatch.setattr(convolution, "_KEPT", {"cpu": 0, "cuda": 0})
        monkeypatch.setattr(gram, "pays", lambda *_: False)
    for value in (0.1, 0.13, 0.3, 0.45, 0.7, 0.9):
        if kind in ("convolution", "not kept"):
            net, x = nn.Conv2d(256, 256, 3, bias=False), torch.full((1, 256, 26, 26), value)
        elif kind == "linear":
            net, x = nn.Linear(256, 256, bias=False), torch.full((1, 256, 256), value)
        elif kind == "embedding":
            net, x = nn.Embedding(4, 100_000), torch.tensor([[1]])
        else:
            net, x = nn.LayerNorm(100_000), value * torch.randn(1, 100_000).sign()
        net, x = (each.to(DEVICE) for each in (net, x))
        assert 1.0 - (1e-4 if twice else 1e-5) < added(net, x, 3e3 * value) <= 1.0


def test_two_calls_of_the_model_in_one_backward_pass_are_refused():
    """Row i of both might be different examples, and each example would count twice."""
    torch.manual_seed(0)
    model, x = nn.Linear(5, 4), torch.randn(6, 5)
    clipper = Clipper(model, list(model.parameters()), 1.0)
    met = (model(x) * model(x.flip(0))).sum(1).mean()
    met.backward()
    with pytest.raises(ValueError, match="must be called once for each backward pass"):
        clipper.sums()
    assert clipper.examples == 0


def test_a_factor_that_float32_can_hardly_hold_counts_as_zero():
    """Below 2^-126 float32 has fewer bits, and a rounded factor would let gradients exceed C."""
    clip_norm = 2.0**-120
    torch.manual_seed(0)
    for size in torch.rand(20).mul(2.0**22).add(2.0**20).tolist():
        net = nn.Linear(3, 1, bias=False)
        clipper = Clipper(net, list(net.parameters()), clip_norm)
        (net(torch.full((1, 3), size))).mean().backward()
        assert norm(each.double() for each in clipper.sums()) <= clip_norm
        clipper.recorder.close()
