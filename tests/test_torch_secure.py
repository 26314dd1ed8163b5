"""Secure mode: sums without rounding, releases rounded once, and what is refused."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import training
from hypothesis import given
from hypothesis import strategies as st
from opacus.utils.batch_memory_manager import BatchMemoryManager

from corrnoise import evidence, planning
from corrnoise.apps import datasets
from corrnoise.apps import training as apps_training
from corrnoise.apps.cli.train import _write
from corrnoise.noise.exact import ExactNoise
from corrnoise.torch import PrivacyEngine
from corrnoise.torch.fingerprint import PositionHash
from corrnoise.torch.grid_sums import MOST_EXAMPLES, grid, grid_sum
from corrnoise.torch.precision import clip_factors, wide_factors

KEY = training.KEY


def engine(**options):
    return PrivacyEngine(secure_mode=True, **{"key": KEY, **options})


def squared_norm(values):
    """Exactly."""
    return sum(Fraction(float(value)) ** 2 for value in values)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(
    rows=st.lists(st.lists(floats, min_size=3, max_size=3), min_size=1, max_size=6),
    clip=st.floats(1e-6, 1e6),
)
def test_no_example_exceeds_the_clip_norm(rows, clip):
    grads, unit = torch.tensor(rows, dtype=torch.float32), grid(clip)
    factors = wide_factors([grads], clip)
    for row, factor in zip(grads, factors, strict=True):
        added = grid_sum(row[None], factor[None], unit)
        assert squared_norm(added) <= Fraction(clip) ** 2
        assert all((Fraction(float(value)) / Fraction(unit)).denominator == 1 for value in added)
        # Toward zero, by less than one unit.
        whole = [Fraction(float(x)) * Fraction(float(factor)) for x in row]
        for value, right in zip(added.tolist(), whole, strict=True):
            assert abs(Fraction(value)) <= abs(right) * (1 + Fraction(2) ** -53)
            slack = abs(right) * Fraction(2) ** -53
            assert abs(Fraction(value) - right) < Fraction(unit) + slack


@pytest.mark.parametrize("length", [1e-30, 1.0, 1e30, 3e38])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_norms_hold_for_long_and_short_gradients(length, kind):
    generator = torch.Generator().manual_seed(4)
    grads = (torch.rand(5, 400, generator=generator) * length).to(kind)
    for clip in (1e-3, 1.0, 7.0):
        for row in grads:
            added = grid_sum(row[None], wide_factors([row[None]], clip), grid(clip))
            assert squared_norm(added) <= Fraction(clip) ** 2
            if length >= 1.0:
                assert squared_norm(added) > Fraction(0.999 * clip) ** 2


def test_sums_do_not_depend_on_the_order_or_the_pieces():
    grads = torch.randn(64, 50, generator=torch.Generator().manual_seed(1)) * 3
    factors, unit = wide_factors([grads], 1.5), grid(1.5)
    whole = grid_sum(grads, factors, unit)
    for seed in range(3):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
        pieces = [grid_sum(grads[some], factors[some], unit) for some in order.split(7)]
        assert torch.equal(functools.reduce(torch.add, pieces), whole)
    exact = [
        sum(
            math.trunc(Fraction(float(x)) * Fraction(float(a)) / Fraction(unit))
            for x, a in zip(column, factors, strict=True)
        )
        for column in grads.T
    ]
    assert (whole / unit).tolist() == exact
    # A sum in float32 depends on it.
    plain = grads * clip_factors([grads], 1.5)[:, None]
    assert not torch.equal(plain.sum(0), plain.flip(0).cumsum(0)[-1])


def test_a_sum_stays_below_the_bits_of_float64():
    for clip in (1.0, 1.999999, 0.7, 1e-5):
        assert MOST_EXAMPLES * clip / grid(clip) < 2.0**53
        assert 2.0**-31 * clip < grid(clip) <= 2.0**-30 * clip


def captured(monkeypatch):
    """The sums before noise, and the releases, of every step."""
    seen = []
    real = ExactNoise.add_

    def add_(self, grads, step, scale, offsets=None):
        before = [grad.clone() for grad in grads]
        real(self, grads, step, scale, offsets)
        seen.append((before, [grad.clone() for grad in grads], step, scale))

    monkeypatch.setattr(ExactNoise, "add_", add_)
    return seen


@pytest.mark.parametrize("mode", ["auto", "functorch", "ew"])
def test_a_run_releases_exact_sums_with_exact_noise(mode, monkeypatch):
    seen = captured(monkeypatch)
    run = engine()
    net, optimizer, loader = training.private(run, grad_sample_mode=mode, max_grad_norm=0.7)
    training.train(net, optimizer, loader, steps=3)
    noise = ExactNoise(run.plan.mechanism, KEY)
    unit = grid(0.7)
    for before, after, step, scale in seen:
        assert scale == 0.7
        sums = torch.cat([part.view(-1) for part in before])
        assert torch.equal(sums / unit, (sums / unit).round())
        assert 0 < float(sums.norm()) <= 10 * 0.7
        release = noise.release(step, scale)
        right = [noise.nearest(float(value), k, release) for k, value in enumerate(sums[:40])]
        flat = torch.cat([part.view(-1) for part in after])
        assert (flat[:40] / release.grid).tolist() == right
    assert [step for *_, step, _ in seen] == [0, 1, 2]
    last = torch.cat([part.view(-1) for part in seen[-1][1]])
    given_ = torch.cat([param.grad.view(-1) for param in net.parameters()])
    assert torch.equal(given_, last.float() / 10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA is not available")
def test_a_run_on_a_gpu_releases_what_the_cpu_would(monkeypatch):
    """Its sums lie on the grid, and its releases are the CPU's of the same sums, bit for bit."""
    seen, run = captured(monkeypatch), engine()
    net, optimizer, loader = training.private(run, net=training.model().to("cuda"))
    while len(seen) < 4:
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x.to("cuda")), y.to("cuda")).backward()
            optimizer.step()
    noise = ExactNoise(run.plan.mechanism, KEY)
    for before, after, step, scale in list(seen):
        assert before[0].device.type == "cuda"
        sums = [part.cpu() for part in before]
        assert all(torch.equal(part / grid(1.0), (part / grid(1.0)).round()) for part in sums)
        noise.add_(sums, step, scale)
        assert all(torch.equal(one, other.cpu()) for one, other in zip(sums, after, strict=True))


def gradient(net, x, y):
    loss = torch.nn.CrossEntropyLoss()(net(x), y)
    parts = torch.autograd.grad(loss, list(net.parameters()))
    return torch.cat([part.reshape(-1) for part in parts])[None]


def test_the_sum_is_that_of_single_examples(monkeypatch):
    """In every bit where they come one by one; the model rounds otherwise where they do not."""
    seen = captured(monkeypatch)
    plain, total = training.model(), 0.0
    net, optimizer, loader = training.private(engine(), max_grad_norm=0.3)
    x, y = next(iter(loader))
    for one, label in zip(x, y, strict=True):
        grad = gradient(plain, one[None], label[None])
        total = total + grid_sum(grad, wide_factors([grad], 0.3), grid(0.3))
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=1, optimizer=optimizer
    ) as parts:
        training.train(net, optimizer, parts, steps=10)
    assert torch.equal(torch.cat([part.view(-1) for part in seen[0][0]]), total)
    seen.clear()
    net, optimizer, loader = training.private(engine(), max_grad_norm=0.3)
    training.train(net, optimizer, loader, steps=1)
    found = torch.cat([part.view(-1) for part in seen[0][0]])
    assert torch.allclose(found, total, rtol=0, atol=1e-5)


def test_micro_batches_add_up_without_rounding(monkeypatch):
    seen = captured(monkeypatch)
    net, optimizer, loader = training.private(engine())
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
    ) as parts:
        training.train(net, optimizer, parts, steps=4)
    assert len(seen) == 1
    sums = torch.cat([part.view(-1) for part in seen[0][0]])
    assert torch.equal(sums / grid(1.0), (sums / grid(1.0)).round())


def test_a_run_resumes_bit_for_bit(tmp_path):
    def begin(place):
        run = engine(key=tmp_path / f"{place}.key", ledger=tmp_path / f"{place}.ledger")
        return run, *training.private(run, net=training.model(dropout=0.3))

    run, net, optimizer, loader = begin("a")
    training.train(net, optimizer, loader, steps=6)
    run.save_checkpoint(path=tmp_path / "model.pt", module=net, optimizer=optimizer)
    training.train(net, optimizer, loader, steps=6)
    run.close()
    again, other, optimizer, loader = begin("a")
    again.load_checkpoint(path=tmp_path / "model.pt", module=other, optimizer=optimizer)
    training.train(other, optimizer, loader, steps=6)  # the ledger accepts no other gradients
    again.close()
    assert torch.equal(training.weights(net), training.weights(other))


def test_a_run_may_not_change_its_mode(tmp_path):
    places = {"key": tmp_path / "key", "ledger": tmp_path / "ledger"}
    run = engine(**places)
    net, optimizer, loader = training.private(run)
    training.train(net, optimizer, loader, steps=1)
    run.close()
    with pytest.raises(ValueError, match="noise"):
        training.private(PrivacyEngine(**places), grad_sample_mode="hooks")


@pytest.mark.parametrize(
    ("engine_options", "options", "words"),
    [
        ({}, {"grad_sample_mode": "one_pass"}, "gradient of each example.*'one_pass'"),
        ({}, {"grad_sample_mode": "ghost"}, "gradient of each example.*'one_pass'"),
        ({}, {"mechanism": "blt", "num_bands": 2}, "banded C⁻¹"),
        ({}, {"mechanism": "band_mf"}, "banded C⁻¹"),
        ({"memory": 3}, {}, "regenerated, got memory=3"),
        ({}, {"max_grad_norm": 1e-31}, "clip norm in"),
        ({}, {"mechanism": "dp_sgd", "noise_generator": torch.Generator()}, "noise_generator"),
    ],
    ids=["one_pass", "ghost", "blt", "band_mf", "memory", "clip", "generator"],
)
def test_what_is_not_covered_is_refused(engine_options, options, words):
    with pytest.raises(ValueError, match=f"secure_mode needs.*{words}"):
        training.private(engine(**engine_options), **options)


def test_no_noise_and_audits_are_refused():
    with (
        pytest.warns(UserWarning, match="no noise"),
        pytest.raises(ValueError, match="secure_mode needs a run with noise"),
    ):
        training.private(engine(), noise_multiplier=0.0)
    run = engine()
    training.private(run)
    with pytest.raises(ValueError, match="audit must be called without secure_mode"):
        run.audit()


def test_several_processes_and_devices_are_refused(monkeypatch):
    monkeypatch.setattr("corrnoise.torch.processes.Processes.distributed", property(lambda _: True))
    with pytest.raises(ValueError, match="secure_mode needs one process"):
        training.private(engine())
    monkeypatch.undo()
    net = training.model()
    net[0].to("meta")
    with pytest.raises(ValueError, match="secure_mode needs one device, got cpu, meta"):
        training.private(engine(), net=net)


def test_too_many_examples_for_float64_are_refused(monkeypatch):
    monkeypatch.setattr("corrnoise.torch.opacus.MOST_EXAMPLES", 9)
    run = engine()
    net, optimizer, loader = training.private(run)
    with pytest.raises(ValueError, match="at most 9 examples in secure_mode"):
        training.train(net, optimizer, loader, steps=1)
    assert run.steps_released == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sum_shows_a_gradient_that_is_not_finite(bad):
    """So that the step refuses it: no conversion makes a number of it."""
    grads = torch.tensor([[1.0, bad], [1.0, 1.0]])
    assert not grid_sum(grads, wide_factors([grads], 1.0), grid(1.0)).isfinite().all()


def test_one_clip_norm_for_each_layer(monkeypatch):
    seen = captured(monkeypatch)
    clips = [0.1, 0.2, 0.3, 0.4]
    run = engine()
    net, optimizer, loader = training.private(run, clipping="per_layer", max_grad_norm=clips)
    training.train(net, optimizer, loader, steps=1)
    before, _, _, scale = seen[0]
    assert scale == math.hypot(*clips)
    assert all(float(part.norm()) <= 10 * clip for part, clip in zip(before, clips, strict=True))


def test_the_statement_says_what_is_exact_and_what_is_assumed():
    run = engine()
    training.private(run)
    found = run.statement()
    text = found.to_text()
    assert found.exact_release
    assert found.truncation is None
    assert "rounded toward zero and summed as integers" in text
    assert "tangent within a relative 2^-44" in " ".join(text.split())
    assert "arithmetic without rounding" not in text
    assert type(found).from_dict(found.to_dict()) == found
    plain = PrivacyEngine(key=KEY)
    training.private(plain)
    assert "arithmetic without rounding" in " ".join(plain.statement().to_text().split())


def test_the_files_of_a_secure_run_are_verified(tmp_path, monkeypatch):
    data = datasets.load("digits")
    plan = planning.plan(
        num_examples=len(data.train), batch_size=240, epochs=1, epsilon=8.0, delta=1e-4,
        sampling="fixed", mechanisms=["bisr"],
    )  # fmt: skip
    secure = functools.partial(PrivacyEngine, secure_mode=True)
    monkeypatch.setattr(apps_training, "PrivacyEngine", secure)
    run = apps_training.train(plan, data, label="bisr", folder=tmp_path / "run", model="linear")
    _write(tmp_path / "run", [run])
    verdict = evidence.verify(tmp_path / "run")
    assert verdict.holds, verdict.to_text()
    assert "exact-chacha20" in (tmp_path / "run" / "ledger").read_text()
    answers = {each.subject: each.answer for each in evidence.checklist(run)}
    assert answers["Floating point"].startswith("In the release: sums are exact")


def test_the_hash_of_a_step_sees_every_bit_of_float64():
    found = PositionHash(bytes(32))
    values = torch.randn(9, dtype=torch.float64)
    other = values.clone()
    other[3] = np.nextafter(float(values[3]), 10.0)
    assert int(found([values])) != int(found([other]))
    assert int(found([values, torch.tensor(1.0, dtype=torch.float64)])) != int(found([values]))
