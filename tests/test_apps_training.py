from __future__ import annotations

import pytest
import torch
from opacus.layers import DPLSTM

import corrnoise as cn
from corrnoise.apps import datasets, training
from corrnoise.apps.averaging import Average
from corrnoise.apps.training import default_rate, sgd_settings
from corrnoise.records import Run, Statement, keys
from corrnoise.torch import workload_of


def train(*arguments, **options):
    """Runs here repeat a key on purpose; a process would refuse that otherwise."""
    keys._RELEASED.clear()
    return training.train(*arguments, **options)


def plan(**options):
    asked = {"epochs": 3, "epsilon": 8, "delta": 1e-4, "sampling": "fixed", "mechanisms": ["bisr"]}
    return cn.plan(num_examples=1437, batch_size=96, momentum=0.9, **{**asked, **options})


@pytest.fixture(scope="module")
def digits():
    return datasets.load("digits")


def test_training_learns_and_keeps_its_guarantee(digits):
    found = train(plan(), digits, learning_rate=0.1)
    assert [record.step for record in found.records] == [15, 30, 45]
    assert found.test_accuracy > 0.6  # chance is 0.1
    assert found.records[-1].epsilon == found.statement.epsilon == 8
    assert found.statement.steps_taken == 45
    assert found.records[0].loss > found.records[-1].loss
    assert found.model["num_parameters"] == 9610


def test_epsilon_is_known_after_every_epoch(digits):
    asked = {"epochs": 8, "sampling": "balls-in-bins", "mechanisms": ["dp_sgd"]}
    found = [record.epsilon for record in train(plan(**asked), digits, model="linear").records]
    assert found == sorted(found)
    assert len(found) == 8
    assert 0 < found[0] < found[-1] == 8
    silent = train(plan(), digits, model="linear", track_epsilon=False)
    assert {record.epsilon for record in silent.records} == {None}


def test_a_model_that_takes_no_empty_batch_trains_on_poisson_batches(digits):
    class Reshaping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 10)

        def forward(self, x):
            assert len(x), "an empty batch"
            return self.layer(x.reshape(len(x), 64))

    # A batch is empty with probability 0.36, so that 60 steps have none with 1e-12.
    few = datasets.Tensors(digits.train.inputs[:20], digits.train.labels[:20])
    small = datasets.Data("small", few, digits.test, 10)
    asked = {"sampling": "poisson", "mechanisms": ["dp_sgd"], "epsilon": 50, "delta": 1e-3}
    by = cn.plan(num_examples=20, batch_size=1, epochs=3, momentum=0.9, **asked)
    found = train(by, small, model=Reshaping(), learning_rate=0.01)
    assert found.records[-1].step == 60


def test_a_model_of_opacus_layers_trains_on_poisson_batches(digits):
    """Its hooks need a backward pass for an empty batch too."""

    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = DPLSTM(8, 6, batch_first=True), torch.nn.Linear(6, 10)

        def forward(self, x):
            return self.last(self.inner(x[:, 0])[0][:, -1])

    few = datasets.Tensors(digits.train.inputs[:20], digits.train.labels[:20])
    small = datasets.Data("small", few, digits.test, 10)
    asked = {"sampling": "poisson", "mechanisms": ["dp_sgd"], "epsilon": 50, "delta": 1e-3}
    by = cn.plan(num_examples=20, batch_size=1, epochs=3, momentum=0.9, **asked)
    found = train(by, small, model=Recurrent(), learning_rate=0.01)
    assert found.records[-1].step == 60


def test_a_run_turns_into_json_and_back(digits):
    found = train(plan(epochs=1), digits, label="mine")
    again = Run.from_json(found.to_json())
    assert again == found
    assert again.statement.to_text() == found.statement.to_text()


def test_a_killed_run_resumes_from_its_folder(digits, tmp_path):
    class StopError(Exception):
        pass

    def stop(taken, total):
        if taken == 30:
            raise StopError

    options = {"learning_rate": 0.1, "folder": tmp_path / "run"}
    with pytest.raises(StopError):
        train(plan(), digits, progress=stop, **options)
    seen = []
    found = train(plan(), digits, progress=lambda *state: seen.append(state), **options)
    assert seen == [(45, 45)]
    assert [record.step for record in found.records] == [15, 30, 45]
    assert (tmp_path / "run.key").exists()  # beside the folder, not in it
    assert not list((tmp_path / "run").glob("*.key"))


@pytest.mark.parametrize("changed", [{"learning_rate": 0.2}, {"seed": 1}, {"schedule": "linear"}])
def test_a_run_does_not_resume_with_other_settings(digits, tmp_path, changed):
    class StopError(Exception):
        pass

    def stop(taken, total):
        raise StopError

    options = {"learning_rate": 0.1, "folder": tmp_path / "run"}
    with pytest.raises(StopError):
        train(plan(), digits, progress=stop, **options)
    with pytest.raises(ValueError, match="differs in settings"):
        train(plan(), digits, **{**options, **changed})


def test_small_physical_batches_change_nothing_but_rounding(digits):
    key = cn.noise.Key.from_bytes(bytes(range(32)))
    one, other = (
        train(plan(), digits, learning_rate=0.1, key=key, max_physical_batch_size=most)
        for most in (None, 17)
    )
    assert one.test_accuracy == pytest.approx(other.test_accuracy, abs=0.01)


@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 0.999), (0.0, 0.99), (0.5, 1.0)])
def test_weight_decay_gives_the_workload_of_the_plan(momentum, decay):
    weight = torch.nn.Parameter(torch.zeros(1))
    beta, shrink = sgd_settings(momentum, decay, 0.2)
    optimizer = torch.optim.SGD([weight], lr=0.2, momentum=beta, weight_decay=shrink)
    workload = workload_of(optimizer, 10)
    assert workload.momentum == pytest.approx(momentum)
    assert workload.decay == pytest.approx(decay)


def test_the_default_rate_follows_the_error():
    small, large = plan(), plan(epsilon=2)
    ratio = default_rate(small, 1.0, 100) / default_rate(large, 1.0, 100)
    assert ratio == pytest.approx(large.error / small.error)


def test_bad_settings_are_refused(digits):
    with pytest.raises(ValueError, match="learning_rate"):
        train(plan(), digits, learning_rate=-1.0)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="without a CUDA GPU"):
            train(plan(), digits, device="cuda")
    with pytest.raises(ValueError, match="clip_norm"):
        train(plan(), digits, clip_norm=0.0)
    other = cn.plan(
        num_examples=1400, batch_size=96, epochs=1, epsilon=8, delta=1e-4,
        sampling="fixed", mechanisms=["bisr"],
    )  # fmt: skip
    with pytest.raises(ValueError, match="the plan's 1400 examples"):
        train(other, digits)


def test_a_statement_of_a_plan_alone():
    found = Statement.of(plan(), clip_norm=2.0)
    assert found.steps_taken == found.num_steps
    assert "standard deviation" in found.to_text()
    assert Statement.from_dict(found.to_dict()) == found


@pytest.mark.parametrize("options", [{"schedule": "linear"}, {"average_last": 0.5}])
def test_schedule_and_averaging_resume_exactly(digits, tmp_path, options):
    key = cn.noise.Key.from_bytes(bytes(range(32)))
    whole = train(plan(), digits, learning_rate=0.2, key=key, **options)
    plain = train(plan(), digits, learning_rate=0.2, key=key)
    assert whole.records[-1].test_loss != plain.records[-1].test_loss

    def stop(taken, total):
        if taken == 30:
            raise KeyboardInterrupt

    settings = {"learning_rate": 0.2, "folder": tmp_path / "run", **options}
    with pytest.raises(KeyboardInterrupt):
        train(plan(), digits, progress=stop, **settings)
    resumed = train(plan(), digits, **settings)
    again = train(plan(), digits, key=cn.noise.Key.load(tmp_path / "run.key"), **{
        **settings, "folder": None
    })  # fmt: skip
    assert resumed.records == again.records


def test_the_average_is_the_mean_of_the_last_weights():
    net = torch.nn.Linear(2, 1, bias=False)
    average = Average(list(net.parameters()), 4, 0.5)
    for value in (1.0, 2.0, 3.0, 5.0):
        torch.nn.init.constant_(net.weight, value)
        average.update()
    with average.weights():
        assert net.weight.tolist() == [[4.0, 4.0]]
    assert net.weight.tolist() == [[5.0, 5.0]]


def test_a_model_of_ones_own_with_frozen_parts(digits):
    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )
    net[1].requires_grad_(False)
    frozen = net[1].weight.clone()
    found = train(plan(), digits, model=net, learning_rate=0.2)
    assert found.model == {"name": "Sequential", "num_parameters": 330}
    assert found.test_accuracy > 0.3
    assert torch.equal(net[1].weight, frozen)
