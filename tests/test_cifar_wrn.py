"""The benchmark of a wide residual network on CIFAR-10: its layers, its pictures and its runs."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import cifar_wrn  # noqa: E402
import corrnoise as cn  # noqa: E402
import wrn_data  # noqa: E402
import wrn_layers  # noqa: E402
import wrn_norm  # noqa: E402
import wrn_probe  # noqa: E402
import wrn_settings  # noqa: E402
import wrn_training  # noqa: E402
from corrnoise.torch.clipping import products  # noqa: E402
from corrnoise.torch.clipping.clipper import Clipper  # noqa: E402
from corrnoise.torch.clipping.parts import Factors  # noqa: E402
from corrnoise.torch.clipping.reference import clipped_sums  # noqa: E402
from corrnoise.torch.workload import workload_of  # noqa: E402


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("views", [1, 3])
def test_clipped_sums_are_those_of_the_loop_over_examples(views, channels_last):
    torch.manual_seed(0)
    net = wrn_layers.WideResNet(10, 1, groups=4, channels_last=channels_last)
    params, count = list(net.parameters()), 4
    with torch.no_grad():
        for param in params:
            param.add_(0.05 * torch.randn_like(param))
        net.stem.weight[0].normal_(std=1e-4)  # a row that is too short to be scaled to norm 1
    x = torch.randint(0, 256, (count * views, 3, 8, 8), dtype=torch.uint8)
    y = torch.randint(0, 10, (count,)).repeat_interleave(views)

    def loss(i):
        rows = slice(i * views, (i + 1) * views)
        return functional.cross_entropy(net(x[rows]), y[rows])

    def norm(some):
        return float(torch.cat([each.flatten() for each in some]).norm())

    each = [norm(clipped_sums(lambda _, i=i: loss(i), params, 1, 1e9)) for i in range(count)]
    clip = sorted(each)[count // 2]
    wanted = clipped_sums(loss, params, count, clip)
    clipper = Clipper(net, params, clip, views=views)
    functional.cross_entropy(net(x), y).backward()
    for a, b in zip(wanted, clipper.sums(), strict=True):
        assert norm([a - b]) <= 1e-5 * norm([a])


def test_the_weight_has_rows_of_mean_0_and_norm_1():
    torch.manual_seed(0)
    weight, sizes = wrn_layers.StandardConv2d(8, 5, 3).standardised()
    torch.testing.assert_close(weight.mean((1, 2, 3)), torch.zeros(5), atol=1e-7, rtol=0)
    torch.testing.assert_close(weight.square().sum((1, 2, 3)), torch.ones(5))
    assert all(0.7 < size < 1.3 for size in sizes.tolist())


def test_normalised_activations_are_those_after_the_relu():
    torch.manual_seed(0)
    x, norm = torch.randn(2, 8, 3, 3), wrn_norm.ReluNorm(8, 4)
    groups = norm(x).unflatten(1, (4, 2)).flatten(2)
    torch.testing.assert_close(groups.mean(2), torch.zeros(2, 4), atol=1e-6, rtol=0)
    smallest = norm(x).flatten(2).amin(2, keepdim=True)  # what a ReLU that is off gives
    assert torch.equal(norm(x).flatten(2) == smallest, (x <= 0).flatten(2))


@pytest.mark.skipif(CUDA, reason="the kernels are interpreted on a machine without a GPU")
def test_little_cancels_where_activations_are_far_from_0(monkeypatch):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    norm = wrn_norm.ReluNorm(16, 16)
    x = 1e3 + torch.randn(2, 16, 8, 8)
    wanted = functional.group_norm(x.double(), 16, eps=norm.eps)
    monkeypatch.setattr(wrn_norm.ReluNorm, "fits", lambda self, x: True)
    assert far(wanted, norm(x)) < 1e-3


def pictures(views, step):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (20, 3, 12, 12), dtype=torch.uint8, generator=generator)
    return x, wrn_data.Pictures(x, torch.arange(20), views, 7, lambda: step)


def test_a_view_is_a_crop_of_the_padded_picture_or_its_mirror_image():
    x, data = pictures(2, 5)
    rows, labels = data.__getitems__([3, 3, 11, 11])
    assert labels.tolist() == [3, 3, 11, 11]
    padded = functional.pad(x.float(), [wrn_data.PADDING] * 4, mode="reflect").byte()
    offsets = range(2 * wrn_data.PADDING + 1)
    for row, label in zip(rows, labels, strict=True):
        crops = [padded[label, :, y : y + 12, x : x + 12] for y in offsets for x in offsets]
        assert any(torch.equal(row, c) or torch.equal(row, c.flip(2)) for c in crops)
    assert torch.equal(data[3][0], x[3])
    assert data.__getitems__([])[0].shape == (0, 3, 12, 12)


def test_a_view_depends_on_the_seed_the_step_the_example_and_its_number_alone():
    _, data = pictures(2, 5)
    alone, _ = data.__getitems__([3, 3])
    among, _ = data.__getitems__([8, 8, 3, 3, 2, 2])
    assert torch.equal(alone, among[2:4])
    assert not torch.equal(alone[0], alone[1])
    assert not torch.equal(alone, pictures(2, 6)[1].__getitems__([3, 3])[0])


def test_crops_and_flips_are_equally_frequent():
    """Each of the 81·2 outcomes 500 times; false alarms with probability below 1e-6."""
    drawn = wrn_data.random(1, 2, torch.arange(81_000), torch.zeros(81_000, dtype=torch.int64))
    counts = (drawn % 162).bincount(minlength=162).double()
    statistic = float(((counts - 500) ** 2 / 500).sum())
    assert statistic < 161 + 5.5 * (2 * 161) ** 0.5


def test_the_random_numbers_are_those_of_splitmix64():
    mask = (1 << 64) - 1

    def mixed(z):
        z = (z + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    state = 0
    for value in (1, 2, 3, 4):
        state = mixed((state + value) & mask)
    found = wrn_data.random(1, 2, torch.tensor([3]), torch.tensor([4]))
    assert found.tolist() == [(state >> 16) & 0x7FFFFFFF]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CORRNOISE_CACHE", str(tmp_path))
    return tmp_path


SMOKE = ["--smoke", "--only", "dp-sgd-8-3", "--precision", "tf32", "--rows", "16"]


@pytest.mark.parametrize("mechanism", ["dp_sgd", "bisr"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_default_rate_is_that_at_which_the_noise_moves_the_weights_as_far(momentum, mechanism):
    """10,000 weights by torch's SGD; their length is within 3 % but for 1 in 10,000 seeds.

    The rate has two digits, so that it is within 5 %.
    """
    recipe = replace(cifar_wrn.SMOKE, batch=10, epochs=3, momentum=momentum, clip_norm=2.0)
    run = wrn_settings.Run("dp-sgd", 8.0, 3, recipe)
    plan = cn.plan(
        num_examples=100, batch_size=10, epochs=3, epsilon=8.0, delta=1e-5, momentum=momentum,
        mechanisms=[mechanism], num_bands=4 if mechanism == "bisr" else None, sampling="fixed",
    )  # fmt: skip
    run, count = replace(run, rate=wrn_settings.default_rate(run, plan)), 10_000
    param = nn.Parameter(torch.zeros(count))
    sgd = torch.optim.SGD([param], lr=run.rate_at(0, plan.num_steps), momentum=momentum)
    past = torch.randn(plan.num_steps, count, generator=torch.Generator().manual_seed(0))
    coef = torch.tensor(plan.mechanism.noising_coef, dtype=torch.float32)
    for step in range(plan.num_steps):
        noise = coef[: step + 1].flip(0) @ past[: step + 1]
        param.grad = 2.0 * plan.noise_multiplier * noise / plan.divisor
        sgd.step()
    moved = float(param.detach().norm()) * (wrn_settings.num_parameters() / count) ** 0.5
    assert moved == pytest.approx(wrn_settings.MOVED, rel=0.08)


def test_recipes_of_both_methods_differ_in_what_the_planner_is_told_alone():
    for minutes, epsilon in itertools.product(cifar_wrn.MINUTES, cifar_wrn.EPSILONS):
        ours, theirs = (
            cifar_wrn.recipes_of(name, minutes, epsilon) for name in ("planner", "dp-sgd")
        )
        assert [recipe.told is None for recipe in ours] == [minutes == 1] * len(ours)
        assert [replace(recipe, told=None) for recipe in ours] == theirs


def test_a_rate_tuned_with_fewer_views_counts_where_none_was_tuned_with_as_many(folder):
    (recipe,) = cifar_wrn.recipes_of("planner", 3, 8.0)
    run = wrn_settings.Run("planner", 8.0, 3, recipe, 1.0)
    # Accuracies with other numbers of views are not compared.
    for views, rate, value, best in (
        (1, 6.0, 60.0, 6.0),
        (1, 12.0, 66.0, 12.0),
        (8, 6.0, 70.0, 12.0),
        (recipe.views, 3.0, 1.0, 3.0),
    ):
        keep(replace(run, recipe=replace(recipe, views=views), rate=rate, seed=-1), value)
        assert cifar_wrn.tuned(run)[0].rate == best


def climbed(accuracy, default):
    found = {}
    while (rate := cifar_wrn.next_rate(found, default)) is not None:
        found[rate] = accuracy(rate)
    return found


@pytest.mark.parametrize(
    ("peak", "wanted"),
    [
        (5, [1, 2, 4, 8]),
        (1.9, [1, 2, 4]),
        (2000, [1, 2, 4, 8, 16]),
        (1e-3, [0.25, 0.5, 1, 2, 4]),
    ],
)
def test_rates_are_tried_beyond_an_end_that_is_the_best_twice_at_most(peak, wanted):
    found = climbed(lambda rate: -abs(rate - peak), 4.0)
    assert sorted(found) == wanted
    assert [rate / 4.0 for rate in found][:3] == list(cifar_wrn.MULTIPLES)


def keep(run, value):
    run.folder.mkdir()
    result = {"rate": run.rate, "recipe": {"views": run.recipe.views}}
    result = wrn_training.with_average(
        run, {**result, "accuracies": {"last": value, run.average: value}}
    )
    (run.folder / "result.json").write_text(json.dumps(result))


def test_rates_tried_with_other_views_are_not_those_that_are_tuned(folder):
    run = wrn_settings.Run("planner", 8.0, 1, replace(cifar_wrn.SMOKE, views=1), seed=-1)
    for multiple, value in zip(cifar_wrn.MULTIPLES, (3.0, 2.0, 1.0), strict=True):
        keep(replace(run, recipe=cifar_wrn.SMOKE, rate=multiple * 4.0), value)
    rates = []
    for each in cifar_wrn.climb(run, 4.0):
        assert each.recipe == run.recipe
        rates.append(each.rate)
        keep(each, -each.rate)
    assert rates == [2.0, 4.0, 1.0, 0.5, 0.25]


def test_the_batch_that_was_best_on_held_out_pictures_counts(folder):
    recipes = cifar_wrn.recipes_of("planner", 1, 8.0)
    runs = [wrn_settings.Run("planner", 8.0, 1, recipe, 1.0) for recipe in recipes]
    small, large = runs
    assert cifar_wrn.chosen(runs, None, None) == [small]  # none was tried
    keep(replace(small, average="tenth"), 50.0)
    assert cifar_wrn.chosen(runs, None, None) == [replace(small, average="tenth")]
    for run, rate, value, best in (
        (small, 2.0, 60.0, (small, 2.0)),
        (large, 4.0, 59.0, (small, 2.0)),
        (large, 8.0, 61.0, (large, 8.0)),
    ):
        keep(replace(run, rate=rate, seed=-1), value)
        (found,) = cifar_wrn.chosen(runs, None, None)
        assert (found.recipe, found.rate) == (best[0].recipe, best[1])
    more = replace(small.recipe, views=7)  # with which any recipe is better
    keep(replace(small, recipe=more, rate=3.0, seed=-1), 70.0)
    (found,) = cifar_wrn.chosen(runs, None, None)
    assert (found.recipe, found.rate) == (large.recipe, 8.0)
    seeds = [replace(run, seed=seed) for run in runs for seed in (0, 1)]
    assert [run.seed for run in cifar_wrn.chosen(seeds, None, None)] == [0, 1]


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_is_interrupted_goes_on_and_is_in_the_table(folder, capsys):
    cifar_wrn.main(["run", *SMOKE, "--rate", "8", "--minutes", "0.0005"])
    assert re.search("step [1-7]/8", capsys.readouterr().out)  # by the speed of the machine
    cifar_wrn.main(["run", *SMOKE, "--rate", "8", "--json", str(folder / "at-once.json")])
    assert "dp-sgd-8-3 rate 8 test" in capsys.readouterr().out
    cifar_wrn.main(["table", "--json", str(folder / "table.json")])
    assert (folder / "at-once.json").read_text() == (folder / "table.json").read_text()
    ((row,),) = json.loads((folder / "table.json").read_text())["rows"]
    assert (row["num_steps"], row["num_examples"], row["sampling"]) == (8, 64, "poisson")
    assert 0 <= row["accuracy"] <= 100


@pytest.mark.filterwarnings("ignore")
def test_the_rate_is_the_best_on_held_out_pictures(folder, capsys):
    cifar_wrn.main(["tune", *SMOKE, "--rate", "8", "4", "16"])
    run = wrn_settings.Run("dp-sgd", 8.0, 3, cifar_wrn.SMOKE, 8.0)
    best, tried = cifar_wrn.tuned(run)
    assert set(tried) == {8.0, 4.0, 16.0}
    assert tried[best.rate] == max(tried.values())
    assert capsys.readouterr().out.count("held out:") == 3
    held = wrn_settings.data_of(replace(run, seed=-1), True)
    whole = wrn_settings.data_of(run, True)
    assert torch.equal(torch.cat([held[0], held[2]]), whole[0])  # nothing of the test


@pytest.mark.filterwarnings("ignore")
def test_runs_without_noise_show_their_course_and_stay_out_of_the_table(folder, capsys):
    cifar_wrn.main(["clean", *SMOKE, "--rate", "4", "2", "--shown", "3"])
    shown = capsys.readouterr().out
    assert shown.count("norm of the weights") == 6
    assert all(f"dp-sgd-inf-3 rate {rate} held out:" in shown for rate in (4, 2))
    found = [json.loads(path.read_text()) for path in folder.glob("wrn-*/result.json")]
    assert {(got["noise_multiplier"], got["rate"]) for got in found} == {(0.0, 4.0), (0.0, 2.0)}
    assert all(got["accuracy"] == max(got["accuracies"].values()) for got in found)
    assert cifar_wrn.results() == []


@pytest.mark.filterwarnings("ignore")
def test_a_run_with_decay_has_its_own_plan_and_folder(folder):
    cifar_wrn.main(["tune", *SMOKE, "--rate", "4", "--decay", "0.99"])
    (plan,) = folder.glob("wrn-plan-*")
    assert plan.name == "wrn-plan-dp-sgd-8-n48-b16-e2-m0-d0.99.json"
    assert [path.name for path in folder.glob("*-tune")] == [
        "wrn-dp-sgd-8-3-b16-v2-e2-constant-m0-d0.99-c1-r4-tune"
    ]


def test_the_decay_of_weights_is_that_of_the_plan_and_others_have_none():
    recipe = replace(cifar_wrn.SMOKE, momentum=0.9, decay=0.999)
    run = wrn_settings.Run("planner", 8.0, 3, recipe, 4.0)
    net = wrn_layers.WideResNet(10, 1, groups=4)
    weights, others = wrn_training.optimizer_of(run, net).param_groups
    assert len(weights["params"]) + len(others["params"]) == len(list(net.parameters()))
    assert all(param.dim() > 1 for param in weights["params"])
    assert others["weight_decay"] == 0
    rate = {"lr": run.rate_at(0, 10), "weight_decay": weights["weight_decay"]}
    sgd = torch.optim.SGD(weights["params"], momentum=weights["momentum"], **rate)
    workload = workload_of(sgd, 5)
    assert (workload.decay, workload.momentum) == pytest.approx((0.999, 0.9), rel=1e-12)


@pytest.mark.parametrize(("kind", "share"), [((0.9999, 4), 1 / 4), ((0.9999, 10), 1 / 10)])
def test_the_average_is_over_about_the_last_part_of_the_steps(kind, share):
    """Of the numbers 1 … n with weights like t^(k - 2) it is (k - 1)/k of n."""
    param = nn.Parameter(torch.zeros(1))
    ema = wrn_training.Ema([param], *kind)
    for step in range(1, 1001):
        param.data.fill_(step)
        ema.update(step)
    assert float(ema.means[0]) == pytest.approx(1000 * (1 - share), rel=2e-2)
    with ema.weights():
        assert float(param.detach()) == float(ema.means[0])
    assert float(param.detach()) == 1000


def test_the_average_that_counts_on_the_test_set_is_the_one_chosen_on_held_out_pictures(folder):
    run = wrn_settings.Run("dp-sgd", 8.0, 3, cifar_wrn.SMOKE, 4.0, seed=-1)
    result = {
        "rate": 4.0,
        "recipe": {"views": run.recipe.views},
        "accuracies": {"last": 1.0, "tenth": 2.0, "quarter": 3.0},
    }
    run.folder.mkdir()
    best = wrn_training.with_average(run, result)
    (run.folder / "result.json").write_text(json.dumps(best))
    (chosen,) = cifar_wrn.chosen([replace(run, seed=0, rate=8.0)], None, None)
    assert (chosen.rate, chosen.average) == (4.0, "quarter")
    result["accuracies"] = {"last": 9.0, "tenth": 8.0, "quarter": 7.0}
    assert wrn_training.with_average(chosen, result)["accuracy"] == 7.0


def test_the_precision_can_be_told_after_every_change():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for rounds in (False, True, False, True, False):
            wrn_settings.set_flags(rounds)
            assert products.precision() == ("high" if rounds else "highest")
            assert products.cudnn_rounds() == rounds
            with products.full_precision():
                assert products.precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_the_checks_of_the_ways_to_compute_agree_with_the_loop():
    found = wrn_probe.check(2, 3, smoke=True)
    assert len(found) == (12 if CUDA else 4)
    assert all(value < 1e-5 for name, value in found.items() if "float32" in name)


def far(a, b):
    return float((a - b).detach().norm() / a.detach().norm())


@pytest.mark.skipif(CUDA, reason="the kernels are interpreted on a machine without a GPU")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("width", "side"), [(16, 6), (64, 4), (512, 2)])
def test_the_kernels_of_normalisation_agree_with_torch(width, side, layout, monkeypatch):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    norm = wrn_norm.ReluNorm(width, 16)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    x = (2 * torch.randn(3, width, side, side) + 1).contiguous(memory_format=layout)
    grad = torch.randn_like(x)
    found = []
    for use in (False, True):
        monkeypatch.setattr(wrn_norm.ReluNorm, "fits", lambda self, x, use=use: use)
        own = x.clone().requires_grad_()
        out = norm(own)
        parts = wrn_norm._norm(norm, [x], [grad], ["weight", "bias"])
        assert (norm.kept is not None) == use  # for the backward pass, which comes next
        out.backward(grad)
        assert norm.kept is None
        found.append([out, own.grad, parts["weight"].each(), parts["bias"].each()])
    for a, b in zip(*found, strict=True):
        assert far(a, b) < 1e-5


@pytest.mark.skipif(CUDA, reason="the kernels are interpreted on a machine without a GPU")
@pytest.mark.parametrize(("examples", "rows", "width"), [(1, 3, 27), (9, 2, 576), (4, 1, 256)])
def test_the_kernel_of_moments_agrees_with_torch(examples, rows, width):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    weight = torch.randn(rows, width)
    for dtype in (torch.float32, torch.bfloat16):
        grads = torch.randn(examples, rows, width).to(dtype)
        exact = grads.double()
        moments = [exact.square().sum(2), exact.sum(2), (exact * weight).sum(2)]
        wanted = torch.stack(moments, 2)
        for make in (wrn_layers.launch_moments, wrn_layers.moments_of):
            found = make(grads, weight)
            assert found.shape == (examples, rows, 3)
            assert found.dtype == torch.float32
            assert far(wanted, found) < 1e-6


@pytest.mark.skipif(CUDA, reason="the kernels are interpreted on a machine without a GPU")
def test_the_kernel_of_biases_agrees_with_torch(monkeypatch):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    conv = wrn_layers.StandardConv2d(4, 24, 3, 2)
    nn.init.normal_(conv.bias)
    x = torch.randn(9, 4, 13, 9).contiguous(memory_format=torch.channels_last)  # two blocks
    found = []
    for use in (False, True):
        monkeypatch.setattr(wrn_layers, "_fused", lambda x, use=use: use)
        own = x.clone().requires_grad_()
        out = conv(own)
        out.square().sum().backward()
        found.append([out, own.grad])
    for a, b in zip(*found, strict=True):
        assert far(a, b) < 1e-6


@pytest.mark.parametrize("scale", [1.0, 9e-3, 1e-4])  # rows are standardised, or too short for it
def test_norms_before_standardisation_are_never_too_small(scale):
    """Gradients along the two directions that are left out, where everything cancels, as well."""
    torch.manual_seed(0)
    conv = wrn_layers.StandardConv2d(4, 6, 3)
    with torch.no_grad():
        conv.weight.mul_(scale)
    weight, sizes = (each.detach() for each in conv.standardised())
    for far_out in (0.0, 1e-3, 1.0):
        grads = weight + 2.0 + far_out * torch.randn(5, *weight.shape)

        class Given:
            def stored(self, grads=grads):
                return grads

        scales = conv.gain.detach() / sizes
        part = wrn_layers._Weight(Given(), weight, scales)
        doubles = wrn_layers._Weight(Given(), weight.double(), scales.double())
        doubles._measured = lambda grads=grads: (grads.movedim(2, -1).flatten(2).double(), None)
        exact = doubles.each().flatten(1).norm(dim=1)
        found = part.norms().squares.sum(1).sqrt()
        whole = (grads.flatten(2).norm(dim=2) * scales).norm(dim=1)
        assert bool((found.double() >= exact).all())
        torch.testing.assert_close(found.double(), exact, atol=3e-3 * float(whole.max()), rtol=1e-5)
        factors = Factors(torch.rand(5))
        wanted = (factors.values.view(5, 1, 1, 1, 1) * doubles.each()).sum(0)
        gap = float((part.weighted(factors) - wanted).norm())
        assert gap <= 1e-5 * float((factors.values * whole).sum())


def added(conv, grads):
    """The norm that clipping is told, and that of what one example adds, in double precision."""
    weight, sizes = (each.detach() for each in conv.standardised())

    class Given:
        def stored(self):
            return grads

    part = wrn_layers._Weight(Given(), weight, conv.gain.detach() / sizes)
    told = part.norms().squares.double().sum(1).sqrt()
    return told, part.weighted(Factors(torch.ones(1))).double().norm()


def test_large_gradients_have_no_small_norms():
    """Of gradients that are nearly constant, where a square of their sum could overflow."""
    torch.manual_seed(0)
    conv = wrn_layers.StandardConv2d(64, 8, 3)
    for size in (1.0, 1e15, 3e17):
        told, truth = added(conv, size * (1 + 0.5 * torch.randn(1, *conv.weight.shape)))
        assert truth * (1 - 1e-6) <= told <= 1.001 * truth
    for size in (1e30, float("inf"), float("nan")):
        assert bool(torch.isinf(added(conv, torch.full((1, *conv.weight.shape), size))[0]))


def test_a_weight_far_from_mean_0_has_no_small_norms():
    """Its standardised rows are not quite of mean 0, by rounding."""
    torch.manual_seed(0)
    conv = wrn_layers.StandardConv2d(64, 1, 3)
    with torch.no_grad():
        conv.weight.add_(1e4)
    for sign in (1.0, -1.0):
        weight = conv.standardised()[0].detach()
        told, truth = added(conv, (weight + sign * weight[0].numel() ** -0.5)[None])
        assert truth * (1 - 1e-6) <= told


def test_rows_that_are_too_wide_for_the_rounding_are_refused():
    conv = wrn_layers.StandardConv2d(257, 1, 3)
    with pytest.raises(ValueError, match="at most 2304"):
        added(conv, torch.ones(1, *conv.weight.shape))


def test_the_figure_in_the_documentation_has_all_runs_of_the_table(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("CORRNOISE_CACHE", str(tmp_path))
    found = json.loads((ROOT / "benchmarks" / "cifar-wrn.json").read_text())
    cifar_wrn.restore(found)
    cifar_wrn.main(["table", "--figure", str(tmp_path / "figure.svg")])
    wanted = (ROOT / "docs" / "assets" / "wrn.svg").read_text()
    assert _points((tmp_path / "figure.svg").read_text()) == _points(wanted)
    assert len(_points(wanted)) >= len(found["rows"])


def _points(picture):
    """Where the markers are; fonts differ between machines."""
    return re.findall(r'<use xlink:href="#m\w+" x="([0-9.]+)" y="([0-9.]+)"', picture)


def test_a_table_can_be_restored_into_an_empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CORRNOISE_CACHE", str(tmp_path))
    found = json.loads((ROOT / "benchmarks" / "cifar-wrn.json").read_text())
    assert cifar_wrn.restore(found) == len(found["tried"]) + sum(map(len, found["rows"]))
    assert cifar_wrn.results() == found["rows"]
    assert cifar_wrn.tried() == found["tried"]
    assert cifar_wrn.restore(found) == 0
