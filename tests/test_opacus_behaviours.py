"""What scripts written for Opacus expect of an engine, in our own words.

``tools/opacus_suite.py`` runs Opacus's own tests. The list here is what they, its examples and its
users' habits ask for, so that it is kept without the network.
"""

from __future__ import annotations

import copy
import io
import math
import warnings

import numpy as np
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators.errors import UnsupportedModuleError
from torch import nn
from torch.utils.data import DataLoader, Dataset
from training import KEY, dataset, loader, model, private, train, weights

from corrnoise.noise import Key
from corrnoise.torch import PrivacyEngine, seeds, workload_of
from corrnoise.torch.clipping.reference import clipped_sums

CRITERION = nn.CrossEntropyLoss()
MODES = ["one_pass", "hooks"]


def assert_gradients_of_a_loop(net, same, x, y):
    """The mean of ten gradients, each clipped to 0.5, as a loop over examples has it."""
    wanted = clipped_sums(
        lambda i: CRITERION(same(x[i : i + 1]), y[i : i + 1]), list(same.parameters()), 10, 0.5
    )
    for param, total in zip(net.parameters(), wanted, strict=True):
        assert torch.allclose(10 * param.grad, total, atol=1e-5)


def started(engine=None, **options):
    engine = engine or PrivacyEngine(key=KEY)
    return engine, *private(engine, **options)


def unprotected(**options):
    """A run without noise, started without its warning."""
    with pytest.warns(UserWarning, match="not private, ε = ∞"):
        return started(PrivacyEngine(), noise_multiplier=0.0, **options)


def read(batches):
    return torch.cat([x for x, _ in batches])


class TestLoaders:
    @pytest.mark.parametrize("sampling", ["fixed", "balls-in-bins", "poisson"])
    def test_a_loader_has_a_length_and_a_sampling_rate(self, sampling):
        *_, batches = started(sampling=sampling, mechanism="dp_sgd")
        assert (len(batches), batches.sample_rate) == (6, 1 / 6)
        assert len(list(batches)) == 6

    def test_a_memory_manager_counts_its_physical_batches(self):
        _, _, optimizer, batches = started(grad_sample_mode="hooks")
        with BatchMemoryManager(
            data_loader=batches, max_physical_batch_size=4, optimizer=optimizer
        ) as small:
            assert len(small) == 6 * 3
            assert len(batches) == 6

    def test_the_data_can_be_looked_at_after_the_last_step(self):
        engine, net, optimizer, batches = started()
        train(net, optimizer, batches, steps=18)
        assert len(read(batches)) == 60
        assert engine.steps_taken == 18

    def test_batches_that_drop_last_makes_larger_are_announced(self):
        with pytest.warns(UserWarning, match=r"drop_last=True leaves 1 batches of 10 for 15"):
            *_, batches = started(data_loader=loader(15, 10, drop_last=True))
        assert [len(x) for x, _ in batches] == [15]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            started(data_loader=loader(61, 10, drop_last=True), mechanism="dp_sgd")


class TestSeeds:
    @staticmethod
    def order(seed=None, key=None, torch_seed=None):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        if torch_seed is not None:
            torch.manual_seed(torch_seed)
        *_, batches = started(
            PrivacyEngine(key=key),
            net=nn.Linear(12, 2),
            data_loader=loader(shuffle=True, generator=generator),
        )
        return read(batches)

    def test_fixed_batches_follow_the_loaders_generator(self):
        assert torch.equal(self.order(seed=1), self.order(seed=1))
        assert torch.equal(self.order(seed=1), self.order(seed=1, key=KEY))
        assert not torch.equal(self.order(seed=1), self.order(seed=2))

    def test_fixed_batches_follow_torchs_seed_where_no_key_decides(self):
        assert torch.equal(self.order(torch_seed=1), self.order(torch_seed=1))
        assert not torch.equal(self.order(torch_seed=1), self.order(torch_seed=2))
        assert torch.equal(self.order(torch_seed=1, key=KEY), self.order(torch_seed=2, key=KEY))

    def test_an_order_uses_every_example_once_an_epoch(self):
        rows = self.order(seed=3)
        assert torch.equal(
            rows[rows[:, 0].argsort()],
            dataset().tensors[0][dataset().tensors[0][:, 0].argsort()],
        )

    def test_a_generator_that_is_not_used_is_announced(self):
        seeds._said.clear()
        data = loader(shuffle=True, generator=torch.Generator().manual_seed(1))
        with pytest.warns(UserWarning, match=r"generator of the data_loader is not used.*key="):
            started(data_loader=data, sampling="balls-in-bins")

    def test_that_seeds_do_not_fix_the_noise_is_said_once(self):
        seeds._said.clear()
        torch.manual_seed(1)
        with pytest.warns(UserWarning, match=r"torch.manual_seed does not fix the noise.*key="):
            started(PrivacyEngine())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message="noise_multiplier=")
            started(PrivacyEngine())

    @pytest.mark.parametrize("sampling", ["fixed", "poisson"])
    def test_a_run_without_noise_follows_seeds_altogether(self, sampling):
        found = []
        for _ in range(2):
            data = loader(shuffle=True, generator=torch.Generator().manual_seed(5))
            _, net, optimizer, batches = unprotected(
                data_loader=data, sampling=sampling, mechanism="dp_sgd"
            )
            train(net, optimizer, batches, steps=4)
            found.append(weights(net))
        assert torch.equal(*found)

    def test_noise_of_ones_own_generator_comes_with_batches_of_ones_own(self):
        found = []
        for seed in (1, 1, 2):
            _, net, optimizer, batches = started(
                PrivacyEngine(),
                data_loader=loader(shuffle=True, generator=torch.Generator().manual_seed(seed)),
                noise_generator=torch.Generator().manual_seed(7),
                sampling="poisson",
                mechanism="dp_sgd",
            )
            train(net, optimizer, batches, steps=3)
            found.append(weights(net))
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])

    def test_another_order_is_another_run(self, tmp_path):
        options = {"key": tmp_path / "key", "ledger": tmp_path / "ledger"}
        path = tmp_path / "state"
        for seed in (1, 2):
            data = loader(shuffle=True, generator=torch.Generator().manual_seed(seed))
            engine = PrivacyEngine(**options)
            if seed == 2:
                with pytest.raises(ValueError, match="order"):
                    started(engine, data_loader=data)
                return
            _, net, optimizer, batches = started(engine, data_loader=data)
            train(net, optimizer, batches, steps=2)
            engine.save_checkpoint(path=path, module=net, optimizer=optimizer)
            engine.close()


class TestWithoutNoise:
    @pytest.mark.parametrize("mode", MODES)
    def test_a_run_without_noise_and_clipping_is_plain_training(self, mode):
        engine, net, optimizer, batches = unprotected(grad_sample_mode=mode, max_grad_norm=1e6)
        train(net, optimizer, batches, steps=12)
        plain = model()
        usual = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        train(plain, usual, loader(), steps=12)
        assert torch.allclose(weights(net), weights(plain), atol=1e-5)
        assert engine.get_epsilon(1e-5) == engine.accountant.get_epsilon(1e-5) == math.inf

    def test_it_has_no_statement(self):
        engine, *_ = unprotected()
        assert engine.get_epsilon(1e-5) == 0.0  # nothing was released yet
        with pytest.raises(ValueError, match="must be above 0 for a privacy statement, got 0"):
            engine.statement()

    def test_its_checkpoint_makes_another_run_unprotected(self):
        first, net, optimizer, batches = unprotected(sampling="fixed")
        train(net, optimizer, batches, steps=3)
        file = io.BytesIO()
        with pytest.warns(UserWarning, match="cannot be resumed"):
            first.save_checkpoint(path=file, module=net, optimizer=optimizer)
        file.seek(0)
        second, other, other_optimizer, others = started(net=model(seed=9))
        with pytest.warns(UserWarning, match=r"without noise.*ε = ∞"):
            second.load_checkpoint(path=file, module=other, optimizer=other_optimizer)
        assert torch.equal(weights(net), weights(other))
        assert second.accountant.state_dict() == first.accountant.state_dict()
        train(other, other_optimizer, others, steps=2)
        assert second.get_epsilon(1e-5) == math.inf
        assert len(second.accountant) == 5

    @pytest.mark.parametrize("by_hand", [False, True])
    def test_what_was_inherited_stays_in_later_checkpoints(self, tmp_path, by_hand):
        first, net, optimizer, batches = unprotected(sampling="fixed")
        train(net, optimizer, batches, steps=3)
        with pytest.warns(UserWarning, match="cannot be resumed"):
            first.save_checkpoint(path=tmp_path / "free", module=net, optimizer=optimizer)
        kept = {"key": tmp_path / "key", "ledger": tmp_path / "ledger"}
        second, net, optimizer, batches = started(PrivacyEngine(**kept))
        with pytest.warns(UserWarning, match=r"without noise.*ε = ∞"):
            second.load_checkpoint(path=tmp_path / "free", module=net, optimizer=optimizer)
        train(net, optimizer, batches, steps=2)
        second.save_checkpoint(path=tmp_path / "own", module=net, optimizer=optimizer)
        second.close()
        third, net, optimizer, batches = started(PrivacyEngine(**kept), net=model(seed=9))
        if by_hand:
            third.load_state_dict(second.state_dict())
        else:
            third.load_checkpoint(path=tmp_path / "own", module=net, optimizer=optimizer)
        assert third.get_epsilon(1e-5) == third.statement().epsilon == math.inf
        assert third.accountant.history == second.accountant.history
        assert len(third.accountant) == 5

    def test_it_does_not_become_a_plan_for_others(self):
        engine, *_ = unprotected()
        with pytest.raises(ValueError, match="noise_multiplier must be"):
            type(engine.plan).from_json(engine.plan.to_json())


class TestAccountant:
    def test_it_answers_as_opacus_accountants_do(self):
        engine, net, optimizer, batches = started(mechanism="dp_sgd", sampling="poisson")
        accountant = engine.accountant
        assert (len(accountant), accountant.history, bool(accountant)) == (0, [], True)
        train(net, optimizer, batches, steps=7)
        assert accountant.history == [(1.0, 1 / 6, 7)]
        assert len(accountant) == 7
        assert accountant.mechanism() == "corrnoise"
        found = accountant.get_epsilon(delta=1e-3, alphas=[2.0, 4.0])
        assert found == engine.get_epsilon(1e-3) > 0.0
        assert accountant.state_dict() == {"history": [(1.0, 1 / 6, 7)], "mechanism": "corrnoise"}

    def test_it_counts_nothing_itself(self):
        engine, *_ = started()
        with pytest.raises(ValueError, match="leave the call out"):
            engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
        with pytest.raises(ValueError, match="load_checkpoint"):
            engine.accountant.load_state_dict({})

    def test_epsilon_of_a_part_needs_no_draws_and_is_no_less_than_a_certificate(self, monkeypatch):
        engine, net, optimizer, batches = started(
            mechanism="bisr", sampling="balls-in-bins", epochs=3, target_epsilon=3.0,
            target_delta=1e-3,
        )  # fmt: skip
        train(net, optimizer, batches, steps=9)
        certified = engine.plan.calibration.spent(9)

        def refuse(*given):
            raise AssertionError("a certificate was drawn")

        monkeypatch.setattr("corrnoise.accounting.certificates.Search", refuse)
        found = [engine.get_epsilon(delta) for delta in (1e-3, 1e-4, 1e-2)]
        assert certified <= found[0] <= 1.5 * certified
        assert found[2] <= found[0] <= found[1]
        assert engine.get_epsilon(1e-3) == found[0]
        assert engine.statement().kind == "bound"


class TestArguments:
    def test_a_tolerance_of_epsilon_is_accepted(self):
        engine, *_ = started(
            epochs=3, target_epsilon=3.0, target_delta=1e-3, epsilon_tolerance=0.1, sampling="fixed"
        )
        assert engine.plan.epsilon == 3.0

    @pytest.mark.parametrize(
        "options", [{"clipping": "adaptive"}, {"target_unclipped_quantile": 0.5}]
    )
    def test_adaptive_clipping_is_refused_in_words(self, options):
        with pytest.raises(ValueError, match=r"follows the data.*choose one max_grad_norm"):
            started(**options)

    def test_an_argument_that_nobody_reads_is_refused(self):
        with pytest.raises(TypeError, match="unknown arguments: sigma; leave them out"):
            started(sigma=1.0)
        with pytest.raises(
            TypeError, match="unknown arguments: nois_multiplier; did you mean noise_m"
        ):
            started(nois_multiplier=1.0)

    def test_gradients_of_ones_own_are_clipped_and_noised(self):
        found = []
        for mode in ("hooks", "no_op"):
            _, net, optimizer, batches = started(grad_sample_mode=mode, mechanism="dp_sgd")
            x, y = next(iter(batches))
            optimizer.zero_grad()
            CRITERION(net(x), y).backward()
            if mode == "no_op":
                params = list(net.parameters())
                rows = [
                    torch.autograd.grad(CRITERION(net(a[None]), b[None]), params)
                    for a, b in zip(x, y, strict=True)
                ]
                for param, each in zip(params, zip(*rows, strict=True), strict=True):
                    param.grad_sample = torch.stack(each)
            optimizer.step()
            found.append(weights(net))
        assert torch.allclose(*found, atol=1e-6)

    def test_scripts_find_the_model_behind_the_wrapper(self):
        net = model()
        _, wrapped, *_ = started(net=net)
        assert wrapped._module is net
        assert [name for name, _ in net.named_modules()].count("_module") == 0
        assert set(net.state_dict()) == set(model().state_dict())


class TestNoiseMultiplier:
    def test_what_correlated_noise_costs_is_said_at_once(self):
        with pytest.warns(UserWarning, match=r"noise_multiplier=1 is ε = .*DP-SGD with Poisson"):
            started(mechanism="bisr")
        with pytest.warns(UserWarning, match="use make_private_with_epsilon, or mechanism"):
            started(mechanism="bisr", sampling="balls-in-bins", noise_multiplier=0.5)

    @pytest.mark.parametrize(
        "options",
        [
            {"mechanism": "dp_sgd", "noise_multiplier": 0.1},
            {
                "mechanism": "bisr",
                "noise_multiplier": 40.0,
                "epochs": 1,
                "data_loader": loader(60, 60),
            },
        ],
    )
    def test_nothing_is_said_where_it_carries_over(self, options):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            started(**options)

    @pytest.mark.parametrize("sampling", ["fixed", "balls-in-bins", "poisson"])
    @pytest.mark.parametrize("sigma", [1e-12, 1e-30])
    def test_noise_that_cannot_be_priced_is_refused_in_words(self, sampling, sigma):
        with pytest.raises(ValueError, match=rf"must be at least .* got {sigma:g}.*use more noise"):
            started(noise_multiplier=sigma, sampling=sampling, mechanism="dp_sgd")


class TestAccumulation:
    @pytest.mark.parametrize(
        ("mode", "mechanism", "sampling"),
        [
            ("one_pass", "bsr", "fixed"),
            ("one_pass", "bsr", "balls-in-bins"),
            ("hooks", "dp_sgd", "fixed"),
            ("functorch", "dp_sgd", "fixed"),
        ],
    )
    def test_a_batch_can_be_taken_in_slices_by_hand(self, mode, mechanism, sampling):
        found = []
        for size in (60, 4):
            engine, net, optimizer, batches = started(
                mechanism=mechanism, sampling=sampling, grad_sample_mode=mode
            )
            for x, y in batches:
                optimizer.zero_grad()
                for a, b in zip(x.split(size), y.split(size), strict=True):
                    CRITERION(net(a), b).backward()
                optimizer.step()
            found.append(weights(net))
            assert engine.steps_taken == 6
        assert torch.allclose(*found, atol=1e-6)

    @pytest.mark.parametrize("largest", [10, 4])
    @pytest.mark.parametrize("mode", [*MODES, "functorch"])
    def test_gradients_may_be_cleared_by_the_model(self, mode, largest):
        """The sums of a step were added to those of the next one, which trained on all of them."""
        found = []
        for by_model in (False, True):
            _, net, optimizer, batches = started(grad_sample_mode=mode)
            with BatchMemoryManager(
                data_loader=batches, max_physical_batch_size=largest, optimizer=optimizer
            ) as small:
                for x, y in small:
                    (net if by_model else optimizer).zero_grad()
                    CRITERION(net(x), y).backward()
                    optimizer.step()
            found.append(weights(net))
        assert torch.equal(*found)

    @pytest.mark.parametrize("mode", MODES)
    def test_fixed_batches_can_be_added_up_where_noise_is_independent(self, mode):
        engine, net, optimizer, batches = unprotected(mechanism="dp_sgd", grad_sample_mode=mode,
                                                      max_grad_norm=1e6)  # fmt: skip
        optimizer.zero_grad()
        for count, (x, y) in enumerate(batches, start=1):
            CRITERION(net(x), y).backward()
            if count % 3 == 0:
                optimizer.step()
                if count == 3:
                    found = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
                optimizer.zero_grad()
        plain = model()
        CRITERION(plain(dataset()[:30][0]), dataset()[:30][1]).backward()
        assert torch.allclose(
            found, torch.cat([p.grad.reshape(-1) for p in plain.parameters()]), atol=1e-6
        )
        assert engine.steps_taken == 6

    def test_added_up_they_cost_what_they_cost_one_by_one(self):
        engine, net, optimizer, batches = started(mechanism="dp_sgd", grad_sample_mode="one_pass")
        for count, (x, y) in enumerate(batches, start=1):
            CRITERION(net(x), y).backward()
            if count % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        single, other, other_optimizer, others = started(mechanism="dp_sgd")
        train(other, other_optimizer, others, steps=6)
        assert engine.steps_taken == engine.steps_released == 6
        assert engine.get_epsilon(1e-3) == single.get_epsilon(1e-3)

    @pytest.mark.parametrize(
        "options", [{"mechanism": "bisr"}, {"mechanism": "dp_sgd", "sampling": "poisson"}]
    )
    def test_elsewhere_they_are_refused(self, options):
        engine, net, optimizer, batches = started(**options)
        for (x, y), _ in zip(batches, range(2), strict=False):
            CRITERION(net(x), y).backward()
        with pytest.raises(ValueError, match="must be taken on its own batch"):
            optimizer.step()
        assert engine.steps_taken == 0

    def test_a_batch_that_is_left_out_of_the_sum_is_refused(self):
        engine, net, optimizer, batches = started(mechanism="dp_sgd")
        for count, (x, y) in enumerate(batches):
            if count != 1:
                CRITERION(net(x), y).backward()
            if count == 2:
                with pytest.raises(ValueError, match=r"30 examples of its.*20 are in the sum"):
                    optimizer.step()
                break
        assert engine.steps_taken == 0

    @pytest.mark.parametrize("mode", MODES)
    def test_a_step_with_a_closure_is_the_same_step(self, mode):
        found = []
        for with_closure in (False, True):
            engine, net, optimizer, batches = started(grad_sample_mode=mode)
            for x, y in batches:

                def closure(net=net, x=x, y=y, optimizer=optimizer):
                    optimizer.zero_grad()
                    loss = CRITERION(net(x), y)
                    loss.backward()
                    return loss

                if with_closure:
                    loss = optimizer.step(closure)
                    assert mode == "hooks" or loss.item() > 0.0  # Opacus's wrapper returns none
                else:
                    closure()
                    optimizer.step()
            assert engine.steps_taken == 6
            found.append(weights(net))
        assert torch.equal(*found)

    def test_zero_grad_forgets_a_backward_pass(self):
        engine, net, optimizer, batches = started()
        x, y = next(iter(batches))
        CRITERION(net(x), y).backward()
        optimizer.zero_grad()
        CRITERION(net(x), y).backward()
        optimizer.step()
        assert engine.steps_taken == 1


class TestOptimizers:
    def test_the_largest_group_decides(self):
        small, large = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(30))
        groups = [{"params": [small], "momentum": 0.5}, {"params": [large], "momentum": 0.9}]
        assert workload_of(torch.optim.SGD(groups, lr=0.1), 10).momentum == 0.9
        large.requires_grad_(False)
        assert workload_of(torch.optim.SGD(groups, lr=0.1), 10).momentum == 0.5

    def test_rmsprop_has_a_momentum(self):
        weight = [nn.Parameter(torch.zeros(3))]
        assert workload_of(torch.optim.RMSprop(weight, momentum=0.8), 10).momentum == 0.8
        plain = workload_of(torch.optim.RMSprop(weight), 10)
        assert np.allclose(plain.coef, 1.0)

    def test_a_warm_up_from_zero_is_read_as_the_rate_that_it_leads_to(self):
        weight = [nn.Parameter(torch.zeros(3))]
        optimizer = torch.optim.SGD(weight, lr=0.5, weight_decay=0.1)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))
        assert optimizer.param_groups[0]["lr"] == 0.0
        assert workload_of(optimizer, 10).decay == pytest.approx(0.95)


class Named(Dataset):
    """Examples that are dictionaries."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {
            "x": torch.ones(12) * index,
            "y": torch.tensor(index % 2),
            "name": f"number {index}",
        }


class Pictures(nn.Module):
    """A convolution over pictures whose dimension ``last`` is the last one in memory."""

    def __init__(self, last, padding):
        super().__init__()
        torch.manual_seed(0)
        self.last = last
        self.convolution, self.out = nn.Conv2d(3, 4, 2, padding=padding), nn.Linear(4, 2)

    def forward(self, x):
        x = x.view(-1, 3, 2, 2).movedim(self.last, -1).contiguous().movedim(-1, self.last)
        return self.out(self.convolution(x).tanh().sum((2, 3)))


class TestLayouts:
    @pytest.mark.parametrize("padding", [0, 1])
    @pytest.mark.parametrize("last", [0, 1], ids=["examples", "channels"])
    @pytest.mark.parametrize("mode", ["hooks", "functorch"])
    def test_convolutions_may_see_pictures_in_any_layout(self, mode, last, padding):
        """Opacus read other pixels, or those of other examples, and said nothing."""
        net = Pictures(last, padding)
        same = copy.deepcopy(net)
        _, net, optimizer, batches = unprotected(
            net=net, grad_sample_mode=mode, max_grad_norm=0.5, mechanism="dp_sgd"
        )
        x, y = next(iter(batches))
        CRITERION(net(x), y).backward()
        optimizer.step()
        assert_gradients_of_a_loop(net, same, x, y)


class Around(nn.Module):
    """A convolution whose padding is no zeros, of one, two or three dimensions."""

    def __init__(self, kind, mode):
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.out = kind(2, 3, 2, padding=1, padding_mode=mode), nn.Linear(3, 2)
        self.size = {nn.Conv1d: (6,), nn.Conv2d: (2, 3), nn.Conv3d: (1, 2, 3)}[kind]

    def forward(self, x):
        seen = self.convolution(x.view(-1, 2, *self.size)).flatten(2)
        return self.out((seen * torch.linspace(0.1, 1.0, seen.shape[2])).tanh().sum(2))


class Bags(nn.Module):
    """Bags in which tokens come twice, and a normalisation without a bias."""

    def __init__(self, mode, *, flat, **options):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.flat = nn.EmbeddingBag(3, 4, mode=mode, **options), flat
        self.norm, self.out = nn.LayerNorm(4, bias=False), nn.Linear(4, 2)

    def forward(self, x):
        tokens = x.sign().long() + 1
        starts = torch.arange(len(x)) * x.shape[1]
        bags = self.table(tokens.flatten(), starts) if self.flat else self.table(tokens)
        return self.out(self.norm(bags))


class Padded(nn.Module):
    """Tokens, some of which are the padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(3, 4, padding_idx=1), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.table(x.sign().long() + 1).sum(1))


class TestPadding:
    @pytest.mark.parametrize(
        "make",
        [
            Padded,
            lambda: Around(nn.Conv1d, "circular"),
            lambda: Around(nn.Conv2d, "reflect"),
            lambda: Around(nn.Conv3d, "replicate"),
            lambda: Bags("sum", flat=False),
            lambda: Bags("mean", flat=True),
        ],
        ids=["embedding", "circular", "reflect", "replicate", "rows of bags", "bags"],
    )
    def test_gradients_are_those_of_torch(self, make):
        """Opacus trained the row for padding, and took every padding for zeros.

        It counted a token that a bag has twice once, and LayerNorm had to have a bias.
        """
        net = make()
        same = copy.deepcopy(net)
        x, y = dataset(10)[:]
        x = x.masked_fill(x.abs() < 0.5, 0.0) if make is Padded else x
        _, net, optimizer, batches = unprotected(
            net=net, grad_sample_mode="hooks", max_grad_norm=0.5, mechanism="dp_sgd", epochs=1,
            data_loader=DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10),
        )  # fmt: skip
        for a, b in batches:
            CRITERION(net(a), b).backward()
            optimizer.step()
        assert_gradients_of_a_loop(net, same, x, y)


@pytest.mark.parametrize("options", [{"mode": "max"}, {"mode": "sum", "padding_idx": 0}])
def test_bags_that_hooks_do_not_know_are_refused(options):
    engine, net, _, batches = started(net=Bags(flat=True, **options), grad_sample_mode="hooks")
    x, y = next(iter(batches))
    with pytest.raises(ValueError, match="an EmbeddingBag must have no mode='max'"):
        CRITERION(net(x), y).backward()
    assert engine.steps_taken == 0


class Scaled(nn.Module):
    """A layer that also needs what is no positional tensor."""

    def __init__(self):
        super().__init__()
        self.weight, self.power = nn.Parameter(torch.ones(12)), 1.0

    def forward(self, x, scale=1.0):
        return (x * scale).abs() ** self.power * self.weight


class Beyond(nn.Module):
    """Uses its layers in a way that hooks on them do not see."""

    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.use, self.layer, self.out = use, Scaled(), nn.Linear(12, 12)

    def forward(self, x):
        return self.use(self, x)[:, :2]


def cooled(part, x):
    part.layer.power = 2.0
    return part.out(part.layer(x))


class TestSums:
    @pytest.mark.parametrize("mode", ["hooks", "functorch"])
    @pytest.mark.parametrize(
        ("use", "name"),
        [
            (lambda part, x: part.out(part.layer(x, scale=3.0)), "layer.weight"),
            (cooled, "layer.weight"),
            (lambda part, x: nn.functional.linear(part.out(x), part.out.weight), "out.weight"),
            (lambda part, x: part.out(x) * part.out.bias.exp(), "out.bias"),
        ],
        ids=["keyword", "attribute", "weight", "bias"],
    )
    def test_gradients_that_hooks_do_not_see_are_refused(self, use, name, mode):
        """Opacus trained on other gradients than those of the loss."""
        net = Beyond(use)
        net.layer.requires_grad_(name.startswith("layer"))
        engine, net, optimizer, batches = started(
            PrivacyEngine(key=KEY, secure_mode=mode == "hooks"), net=net, grad_sample_mode=mode
        )
        before = weights(net)
        x, y = next(iter(batches))
        CRITERION(net(x), y).backward()
        with pytest.raises(ValueError, match=rf"must add up to torch's .* for '{name}' do not"):
            optimizer.step()
        assert engine.steps_taken == 0
        assert weights(net).equal(before)

    def test_the_first_batches_are_looked_at(self):
        _, net, optimizer, batches = started(grad_sample_mode="hooks", loss_reduction="sum")
        train(net, optimizer, batches, steps=2, criterion=nn.CrossEntropyLoss(reduction="sum"))
        assert all(param._backward_hooks for param in net.parameters())
        train(net, optimizer, batches, steps=1, criterion=nn.CrossEntropyLoss(reduction="sum"))
        assert not any(param._backward_hooks for param in net.parameters())


class TestErrors:
    @pytest.mark.parametrize("mode", ["hooks", "functorch"])
    def test_a_parameter_that_is_not_used_is_named(self, mode):
        net = model()
        net.register_module("spare", nn.Linear(3, 3))
        net.forward = lambda x: net[3](net[1](net[0](x)))
        engine, wrapped, optimizer, batches = started(net=net, grad_sample_mode=mode)
        x, y = next(iter(batches))
        CRITERION(wrapped(x), y).backward()
        with pytest.raises(ValueError, match=r"none of 'spare.weight'.*freeze"):
            optimizer.step()
        assert engine.steps_taken == 0

    @pytest.mark.parametrize("mode", ["auto", "hooks"])
    def test_batch_norm_is_named_with_the_remedy(self, mode):
        net = nn.Sequential(nn.Linear(12, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
        with pytest.raises(UnsupportedModuleError, match=r"got BatchNorm in 1 .*get_compatible_mo"):
            started(net=net, grad_sample_mode=mode)

    def test_an_empty_first_batch_of_dictionaries_has_their_structure(self):
        for number in range(1, 20):
            key = Key.from_bytes(bytes([number]) * 32)
            engine, net, optimizer, batches = started(
                PrivacyEngine(key=key),
                data_loader=DataLoader(Named(), batch_size=1),
                sampling="balls-in-bins",
                epochs=1,
            )
            first = next(iter(batches))
            if len(first["x"]) == 0:
                break
        assert first["x"].shape == (0, 12)
        assert first["y"].shape == (0,)
        assert first["y"].dtype == torch.int64
        assert first["name"] == []
        for batch in batches:
            optimizer.zero_grad()
            CRITERION(net(batch["x"]), batch["y"]).backward()
            optimizer.step()
        assert engine.steps_taken == 6


class TestCheckpoints:
    def test_one_that_cannot_be_resumed_says_so_once(self, tmp_path):
        engine, net, optimizer, _ = started(PrivacyEngine())
        with pytest.warns(UserWarning, match=r"cannot be resumed.*no key= and no ledger="):
            engine.save_checkpoint(path=tmp_path / "a", module=net, optimizer=optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.save_checkpoint(path=tmp_path / "a", module=net, optimizer=optimizer)
            kept = PrivacyEngine(key=tmp_path / "key", ledger=tmp_path / "ledger")
            kept, net, optimizer, _ = started(kept, mechanism="dp_sgd")
            kept.save_checkpoint(path=tmp_path / "b", module=net, optimizer=optimizer)

    def test_the_refusal_names_the_key_where_only_the_key_differs(self, tmp_path):
        engine, net, optimizer, batches = started(PrivacyEngine())
        train(net, optimizer, batches, steps=2)
        with pytest.warns(UserWarning, match="cannot be resumed"):
            engine.save_checkpoint(path=tmp_path / "a", module=net, optimizer=optimizer)
        other, net, optimizer, _ = started(PrivacyEngine())
        with pytest.raises(ValueError, match="with the key of its run") as refusal:
            other.load_checkpoint(path=tmp_path / "a", module=net, optimizer=optimizer)
        assert engine.key.fingerprint in str(refusal.value)
        assert "also differs" not in str(refusal.value)
        other, net, optimizer, _ = started(PrivacyEngine(), max_grad_norm=2.0)
        with pytest.raises(ValueError, match="it also differs in max_grad_norm"):
            other.load_checkpoint(path=tmp_path / "a", module=net, optimizer=optimizer)


def test_the_sums_of_a_step_can_be_read_until_the_next_batch():
    """As Opacus's own tests and scripts for debugging do."""
    _, net, optimizer, batches = started(grad_sample_mode="hooks", sampling="fixed")
    for x, y in batches:
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        sums = [param.summed_grad for param in optimizer.params]
        assert all(float(each.norm()) > 0.0 for each in sums)
        assert float(torch.stack([each.norm() for each in sums]).norm()) <= len(x)
        net.zero_grad()
