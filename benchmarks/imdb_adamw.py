"""AdamW and SGD on IMDB at three budgets: the planner's choice and DP-SGD; full and LoRA.

    export CORRNOISE_ENCODER=DIR CORRNOISE_DATA=DIR CORRNOISE_CACHE=DIR
    python benchmarks/imdb_adamw.py prepare              # plans and tokens, on any machine
    python benchmarks/imdb_adamw.py run --minutes 9      # on a GPU, as often as it takes
    python benchmarks/imdb_adamw.py table [--json FILE]
    python benchmarks/imdb_adamw.py restore --json FILE  # the runs of a table, into an empty cache

The encoder, its frozen embeddings, the tokens and the reviews are those of the paper's table
(papers/back_to_square_roots/imdb.py): 25,000 reviews, 4 epochs of batches of 512, a rate that rises
in the first tenth of the steps. The model runs in bfloat16, as a CUDA graph. Plans, tokens and
finished runs are kept in CORRNOISE_CACHE, and a call that is cut off loses the runs that were under
way.

Every method is tuned alike on 2,500 reviews that it is not trained on. Rates that fall linearly to
0 come first: two rungs of a ladder at clip norm 1, and on until both rungs beside the best were
tried; then clip norms 10 and 0.1 at the best rate. Then rates that stay, with the average of
the weights over the last tenth of the steps: half of the best rate, which moves the weights as far,
and half a rung to each side. The two best of all are then trained with a second seed, and the mean
of both decides: 2,500 reviews tell accuracy to about 0.7 points. Rates of SGD are multiples of
``training.default_rate``, and Adam's steps do not depend on the scale of gradients, so a rate means
the same at every clip norm. Three other seeds then train on all reviews. The search is not part of
ε. LoRA has rank 8 on queries and values, and trains the head; it needs peft, which may lie on
PYTHONPATH.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
import warnings
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from corrnoise.papers.back_to_square_roots import imdb, jobs
from torch import Tensor, nn
from torch.utils.data import DataLoader

import corrnoise as cn
import imdb_table
from cifar_headline_runs import graph_size
from corrnoise import _files
from corrnoise.apps import training
from corrnoise.apps.averaging import Average
from corrnoise.apps.datasets import Tensors, whole_batch
from corrnoise.torch import AdamW, PrivacyEngine

DELTA, MOMENTUM, DECAY = 1e-5, 0.9, 0.01
EPSILONS, PARTS = (9.0, 2.0, 0.5), ("full", "lora")
WARM_UP, AVERAGED = 0.1, 0.1  # of the steps
# name: (optimizer, mechanisms, sampling)
METHODS: dict[str, tuple[str, list[str] | None, str]] = {
    "AdamW, planner's choice": ("adamw", None, "best"),
    "AdamW, DP-SGD Poisson": ("torch", ["dp_sgd"], "poisson"),
    "SGD, planner's choice": ("sgd", None, "best"),
    "SGD, DP-SGD Poisson": ("sgd", ["dp_sgd"], "poisson"),
}
# The rate of rung 0 of the ladder, and the factor between rungs.
LADDERS = {
    ("adam", "full"): (2e-4, 2.0),
    ("adam", "lora"): (1e-3, 2.0),
    ("sgd", "full"): (2.0, 2.0),
    ("sgd", "lora"): (0.5, 2.0),
}
# Rungs that are tried first, and those where a search ends.
FIRST, ENDS, CLIPS, AGAIN, SEEDS = (2, 3), (-2, 7), (10.0, 0.1), 2, 3
FALLS, STAYS = "falls", "stays"  # what a rate does
_PLANS: dict[str, cn.Plan] = {}  # each is verified once in a process


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    epsilon: float
    part: str
    method: str

    @property
    def ladder(self) -> tuple[float, float]:
        return LADDERS["sgd" if METHODS[self.method][0] == "sgd" else "adam", self.part]


@dataclass(frozen=True)
class Training:
    """A run: ``rate`` is the number of a rung of the ladder, and a seed below 0 tunes."""

    case: Case
    rate: float
    clip_norm: float
    seed: int
    schedule: str = FALLS

    @property
    def name(self) -> str:
        case = self.case
        seed = {-1: "tuning", -2: "tuning again"}.get(self.seed, str(self.seed))
        return (
            f"text run {case.epsilon:g} {case.part} {case.method} rung {self.rate + 10:g} "
            f"{'' if self.schedule == FALLS else self.schedule + ' '}"
            f"clip {self.clip_norm:g} seed {seed}.json"
        )


def size_of(smoke: bool) -> dict[str, int]:
    return imdb.SMOKE if smoke else imdb.FULL


def held_out(smoke: bool) -> int:
    return 8 if smoke else imdb.HELD_OUT


def plan_of(case: Case, tuning: bool, smoke: bool) -> cn.Plan:
    size = size_of(smoke)
    count = size["num_examples"] - (held_out(smoke) if tuning else 0)
    _, mechanisms, sampling = METHODS[case.method]
    if smoke:
        mechanisms = mechanisms or ["bisr"]

    def make() -> cn.Plan:
        return cn.plan(
            num_examples=count,
            batch_size=size["batch_size"],
            epochs=size["epochs"],
            epsilon=case.epsilon,
            delta=DELTA,
            momentum=MOMENTUM,
            sampling=sampling,
            mechanisms=mechanisms,
        )

    families = "best" if mechanisms is None else "-".join(mechanisms)
    key = f"text plan {case.epsilon:g} {families} {sampling} {count} {size['batch_size']}"
    if key not in _PLANS:
        _PLANS[key] = jobs.cached_plan(key, make)
    return _PLANS[key]


def network(part: str, seed: int) -> nn.Module:
    """The encoder with frozen embeddings and a new head; with LoRA, the encoder frozen too."""
    net = imdb.network(seed)
    shared = getattr(net.encoder.encoder, "relative_attention_bias", None)
    if shared is not None:  # MPNet's: all examples share its rows
        shared.requires_grad_(False)
    if part == "lora":
        import peft

        for param in net.encoder.parameters():
            param.requires_grad_(False)
        torch.manual_seed(seed)
        names = {name.rpartition(".")[2] for name, _ in net.encoder.named_modules()}
        targets = ["query", "value"] if "query" in names else ["q", "v"]
        config = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=targets)
        peft.inject_adapter_in_model(config, net.encoder)
    return net


def make_optimizer(run: Training, plan: cn.Plan, params: list[Any]) -> Any:
    first, factor = run.case.ladder
    rate = first * factor**run.rate
    kind = METHODS[run.case.method][0]
    if kind == "sgd":
        rate *= training.default_rate(plan, run.clip_norm, sum(p.numel() for p in params))
        return torch.optim.SGD(params, lr=rate, momentum=MOMENTUM)
    return (AdamW if kind == "adamw" else torch.optim.AdamW)(params, lr=rate, weight_decay=DECAY)


def rate_at(schedule: str, num_steps: int, step: int) -> float:
    """The part of the learning rate that a step has."""
    left = 1.0 - step / num_steps if schedule == FALLS else 1.0
    return min(1.0, (step + 1) / (WARM_UP * num_steps)) * left


def train(run: Training, smoke: bool) -> dict[str, Any]:
    """One run, or what is kept of it."""
    return json.loads(jobs.kept(run.name, lambda: json.dumps(_train(run, smoke)).encode()))


def _train(run: Training, smoke: bool) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    tuning = run.seed < 0
    plan = plan_of(run.case, tuning, smoke)
    data, held = imdb.tokens(size_of(smoke)["num_examples"] if smoke else None), held_out(smoke)
    kept, test = data.train, data.test
    if tuning:
        kept = Tensors(data.train.inputs[:-held], data.train.labels[:-held])
        test = Tensors(data.train.inputs[-held:], data.train.labels[-held:])
    net = network(run.case.part, 99 - run.seed if tuning else run.seed).to(device)
    params = [param for param in net.parameters() if param.requires_grad]
    optimizer = make_optimizer(run, plan, params)
    engine = PrivacyEngine()
    _, _, loader = engine.make_private(
        module=net,
        optimizer=optimizer,
        data_loader=DataLoader(kept.to(device), batch_size=plan.batch_size, collate_fn=whole_batch),
        max_grad_norm=run.clip_norm,
        plan=plan,
        grad_sample_mode="one_pass",
    )

    def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            found = net(ids)
        return nn.functional.cross_entropy(found.float(), labels)

    step = engine.step_function(loss_of, size=graph_size(plan))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, partial(rate_at, run.schedule, plan.num_steps)
    )
    average = Average(params, plan.num_steps, AVERAGED if run.schedule == STAYS else 0.0)
    start = time.perf_counter()
    while engine.steps_taken < plan.num_steps:
        for batch in loader:
            step(*batch)
            schedule.step()
            average.update()
    with average.weights():
        loss, right = training.evaluate(net, test.to(device), batch_size=1024)
    return {
        **asdict(run),
        "learning_rate": schedule.base_lrs[0],
        "accuracy": 100 * right,
        "loss": loss,
        "seconds": round(time.perf_counter() - start, 1),
        "num_parameters": sum(p.numel() for p in params),
        "mechanism": repr(plan.mechanism),
        "noise_multiplier": plan.noise_multiplier,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def finished(run: Training) -> dict[str, Any] | None:
    """What is kept of a run, if it has ended."""

    def missing() -> bytes:
        raise FileNotFoundError

    try:
        return json.loads(jobs.kept(run.name, missing))
    except FileNotFoundError:
        return None


def tuned(case: Case) -> tuple[list[Training], Training | None, dict[Training, float]]:
    """What is still to be tried, the best choice when nothing is, and all that was tried."""
    found: dict[Training, float] = {}

    def split(runs: list[Training]) -> list[Training]:
        results = {run: finished(run) for run in runs}
        found.update({run: got["accuracy"] for run, got in results.items() if got is not None})
        return [run for run, got in results.items() if got is None]

    split([Training(case, rung, 1.0, -1) for rung in range(ENDS[0], ENDS[1] + 1)])
    rungs = {*FIRST, *(int(run.rate) for run in found)}
    while True:
        left = split([Training(case, rung, 1.0, -1) for rung in sorted(rungs)])
        if left:
            return left, None, found
        best = max(found, key=found.__getitem__)
        beside = {int(best.rate) - 1, int(best.rate) + 1} & set(range(ENDS[0], ENDS[1] + 1))
        if beside <= rungs:
            break
        rungs |= beside
    left = split([Training(case, best.rate, clip, -1) for clip in CLIPS])
    if left:
        return left, None, found
    best = max(found, key=found.__getitem__)
    halves = (best.rate - 1.5, best.rate - 1.0, best.rate - 0.5)
    left = split([Training(case, rung, best.clip_norm, -1, STAYS) for rung in halves])
    if left:
        return left, None, found
    first = sorted(found, key=found.__getitem__, reverse=True)[:AGAIN]
    second = {run: replace(run, seed=-2) for run in first}
    if left := split(list(second.values())):
        return left, None, found
    return [], max(first, key=lambda run: found[run] + found[second[run]]), found


def open_runs(cases: list[Case]) -> list[Training]:
    """What can be run now."""
    runs: list[Training] = []
    for case in cases:
        left, best, _ = tuned(case)
        if best is not None:
            every = [replace(best, seed=seed) for seed in range(SEEDS)]
            left = [run for run in every if finished(run) is None]
        runs += left
    return runs


def run_all(cases: list[Case], minutes: float, workers: int, smoke: bool) -> None:
    """Run what is open, and start nothing that might not end in time."""
    end, longest = time.monotonic() + 60 * minutes, 0.0
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        under_way: dict[Any, tuple[Training, float]] = {}
        while True:
            busy = {run for run, _ in under_way.values()}
            for run in open_runs(cases):
                in_time = time.monotonic() + 1.2 * longest < end
                if run not in busy and len(under_way) < workers and in_time:
                    under_way[pool.submit(train, run, smoke)] = (run, time.monotonic())
            if not under_way:
                break
            for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                run, began = under_way.pop(done)
                longest = max(longest, time.monotonic() - began)
                print(f"{run.name} {done.result()['accuracy']:.2f} %", flush=True)
    print(f"{len(open_runs(cases))} runs can be started next")


def results(cases: list[Case]) -> list[dict[str, Any]]:
    """What is finished: for each case what was tuned, and the runs with all reviews."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        _, best, tried = tuned(case)
        if best is None:
            continue
        every = [replace(best, seed=seed) for seed in range(SEEDS)]
        runs = [{**asdict(run), **got} for run in every if (got := finished(run)) is not None]
        if runs:
            tuning = [
                {
                    "rate": run.rate,
                    "schedule": run.schedule,
                    "clip_norm": run.clip_norm,
                    "seed": run.seed,
                    "held_out": accuracy,
                }
                for run, accuracy in tried.items()
            ]
            rows.append({**asdict(case), "tried": tuning, "runs": runs})
    return rows


def restore(rows: list[dict[str, Any]], cases: list[Case]) -> int:
    """Keep the runs of a table's rows again, where none is kept, and say how many those are."""
    count = 0
    for row in rows:
        case = Case(row["epsilon"], row["part"], row["method"])
        if case not in cases:
            continue
        every = {_training(case, run): {"accuracy": run["held_out"]} for run in row["tried"]}
        every |= {_training(case, run): run for run in row["runs"]}
        for run, got in every.items():
            if finished(run) is None:
                jobs.kept(run.name, lambda got=got: json.dumps(got).encode())
                count += 1
    return count


def _training(case: Case, row: dict[str, Any]) -> Training:
    return Training(case, row["rate"], row["clip_norm"], row["seed"], row["schedule"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("prepare", "run", "table", "restore"))
    parser.add_argument("--minutes", type=float, default=9.0, help="start nothing later")
    parser.add_argument("--workers", type=int, default=3, help="runs that share the GPU")
    parser.add_argument("--part", choices=PARTS, action="append", help="these alone")
    parser.add_argument(
        "--epsilon", type=float, choices=EPSILONS, action="append", help="these alone"
    )
    parser.add_argument("--method", choices=METHODS, action="append", help="these alone")
    parser.add_argument("--smoke", action="store_true", help="24 reviews, to see that it runs")
    parser.add_argument("--json", type=Path, help="the file of the table's rows")
    given = parser.parse_args()
    if "CORRNOISE_CACHE" not in os.environ:
        parser.error("set CORRNOISE_CACHE to a folder that keeps plans, tokens and finished runs")
    if given.command == "restore" and given.json is None:
        parser.error("restore needs --json, the file of a table")
    if given.smoke:
        os.environ["CORRNOISE_CACHE"] += "/smoke"
    cases = [
        Case(epsilon, part, method)
        for part in given.part or PARTS
        for epsilon in given.epsilon or EPSILONS
        for method in given.method or METHODS
    ]
    if given.command == "prepare":
        imdb.tokens(size_of(given.smoke)["num_examples"] if given.smoke else None)
        for case in cases:
            for tuning in (True, False):
                plan = plan_of(case, tuning, given.smoke)
                print(case, tuning, plan.mechanism, plan.noise_multiplier, flush=True)
    elif given.command == "run":
        run_all(cases, given.minutes, given.workers, given.smoke)
    elif given.command == "restore":
        rows = json.loads(given.json.read_text(encoding="utf-8"))["rows"]
        print(f"{restore(rows, cases)} runs")
    else:
        found = {
            "delta": DELTA,
            "date": datetime.date.today().isoformat(),
            "rows": results(cases),
        }
        print(imdb_table.table(found))
        if given.json:
            _files.write(given.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
