"""Hugging Face's Trainer with a budget: real models, loops, LoRA, kills and refusals."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import texts as t
from training import KEY
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
)

from corrnoise.noise import Key
from corrnoise.records import keys, read_entries
from corrnoise.torch import AdamW, PrivacyEngine
from corrnoise.torch.clipping.clipper import Clipper
from corrnoise.torch.clipping.reference import clipped_sums
from corrnoise.transformers import losses, refusals

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*pin_memory.*:UserWarning"
)


def without_dropout(model):
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0  # its draws differ between a batch and its pieces
    return model


def test_training_is_that_of_the_engine_in_a_loop_of_ones_own(tmp_path):
    run = t.trainer(tmp_path / "run", without_dropout(t.bert()), key=KEY)
    run.train()
    assert run.engine.steps_taken == run.state.global_step == 16
    keys._RELEASED.clear()
    model = without_dropout(t.bert()).train()
    names = set(run.get_decay_parameter_names(model))
    named = list(model.named_parameters())
    optimizer = AdamW(
        [
            {"params": [p for n, p in named if n in names], "weight_decay": 0.0},
            {"params": [p for n, p in named if n not in names], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 16)
    collate = DataCollatorWithPadding(t.tokenizer())
    engine = PrivacyEngine(key=KEY)
    loader = DataLoader(t.texts(), batch_size=t.BATCH, shuffle=True, collate_fn=collate)
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, max_grad_norm=1.0, plan=t.PLAN
    )
    for _ in range(t.EPOCHS):
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert torch.allclose(t.weights(run.model), t.weights(model), atol=2e-5)
    assert not torch.allclose(t.weights(model), t.weights(t.bert()), atol=1e-2)


def test_the_statement_and_the_report_lie_beside_the_model(tmp_path):
    run = t.trainer(
        tmp_path / "run",
        eval_dataset=t.texts(9, seed=5),
        args=t.arguments(tmp_path / "run", eval_strategy="steps", eval_steps=8),
        compute_metrics=lambda found: {
            "accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())
        },
    )
    found = run.train()
    run.save_model(str(tmp_path / "final"))
    for folder in ("run", "final"):
        text = (tmp_path / folder / "privacy-statement.txt").read_text()
        assert text.startswith("This training is (8, 0.001)-differentially private.")
        assert text.rstrip() + "\n" == text
        json.loads((tmp_path / folder / "privacy-statement.json").read_text())
    assert "<!doctype html>" in (tmp_path / "run" / "privacy-report.html").read_text()
    assert (tmp_path / "run.key").exists()
    assert not list((tmp_path / "run").rglob("*.key"))
    assert "eval_accuracy" in run.state.log_history[-2]
    # Nothing without noise is logged or saved.
    assert math.isnan(found.training_loss)
    state = json.loads((tmp_path / "run" / "checkpoint-15" / "trainer_state.json").read_text())
    logged = {name for entry in state["log_history"] for name in entry}
    assert not logged & {"loss", "train_loss", "grad_norm", "total_flos"}
    assert "learning_rate" in logged
    assert state["total_flos"] == 0
    assert state["num_input_tokens_seen"] == 0


def test_a_model_that_is_saved_is_published(tmp_path):
    """Else another run could put the same noise on other gradients."""
    run = t.trainer(tmp_path / "run", publishes="checkpoints", callbacks=[t.Stop()])
    with pytest.raises(KeyboardInterrupt):
        run.train()
    with pytest.raises(ValueError, match=r"the ledger .* must be open"):
        run.save_model(str(tmp_path / "early"))
    assert not (tmp_path / "early").exists()
    run.train(resume_from_checkpoint=True)
    assert read_entries(tmp_path / "run" / "ledger")[-1] == {"published": run.state.max_steps}
    run.save_model(str(tmp_path / "final"))
    other = t.arguments(tmp_path / "run", learning_rate=0.3)
    again = t.trainer(tmp_path / "run", args=other, publishes="checkpoints")
    with pytest.raises(ValueError, match="released before with another gradient"):
        again.train()


def test_the_end_of_training_publishes(tmp_path):
    """The weights may be taken from ``run.model``, where no checkpoint is written."""
    args = t.arguments(tmp_path / "run", save_strategy="no")
    run = t.trainer(tmp_path / "run", args=args, publishes="checkpoints")
    run.train()
    assert read_entries(tmp_path / "run" / "ledger")[-1] == {"published": run.state.max_steps}


def test_losses_are_logged_on_request(tmp_path):
    run = t.trainer(tmp_path / "run", log_training_loss=True)
    assert math.isfinite(run.train().training_loss)
    assert any("loss" in entry for entry in run.state.log_history)


def test_a_killed_trainer_resumes_bit_equal(tmp_path):
    script = Path(__file__).with_name("texts.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-500:]
    killed, whole = (torch.load(tmp_path / n / "weights.pt") for n in ("killed", "whole"))
    assert torch.equal(killed, whole)
    # The checkpoint that was cut off is not the one that was resumed from.
    states = [
        json.loads((tmp_path / n / "checkpoint-16" / "trainer_state.json").read_text())
        for n in ("killed", "whole")
    ]
    assert [s["epoch"] for s in states] == [4.0, 4.0]
    rates = [[e.get("learning_rate") for e in s["log_history"]] for s in states]
    assert rates[0] == rates[1]


def test_lora_by_peft(tmp_path):
    peft = pytest.importorskip("peft")
    base = t.bert()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    model = peft.get_peft_model(base, config)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora" in n or "classifier" in n for n in trained)
    run = t.trainer(tmp_path / "run", model)
    run.train()
    assert run.engine.steps_taken == 16
    for name, value in base.state_dict().items():
        if name in before and "classifier" not in name:
            assert torch.equal(value, before[name])
    assert any(
        float(value.abs().sum()) > 0 for n, value in model.state_dict().items() if "lora_B" in n
    )
    assert (tmp_path / "run" / "checkpoint-16" / "adapter_config.json").exists()
    assert f"{sum(p.numel() for p in model.parameters() if p.requires_grad)}" in str(
        run._about()["model"]
    )


ADAPTERS = {
    "IA3Config": {"target_modules": ["key", "value", "output.dense"],
                  "feedforward_modules": ["output.dense"]},
    "LoHaConfig": {"target_modules": ["query", "value"], "r": 2},
    "LoKrConfig": {"target_modules": ["query", "value"], "r": 2},
    "VeraConfig": {"target_modules": ["query", "value"], "r": 4},
    "LoraConfig": {"target_modules": ["word_embeddings", "query"], "r": 2},
    "VBLoRAConfig": {"target_modules": ["query", "value"], "r": 2, "num_vectors": 6,
                     "vector_length": 8},
    "PrefixTuningConfig": {"num_virtual_tokens": 3},
}  # fmt: skip


@pytest.mark.parametrize("kind", ADAPTERS)
def test_gradients_of_adapters_are_clipped_as_the_definition_says(kind):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = getattr(peft, kind)(task_type="SEQ_CLS", **ADAPTERS[kind])
    model = peft.get_peft_model(t.bert(), config).eval()
    with torch.no_grad():  # some begin with zeros, where nothing else would have a gradient
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param) * param.requires_grad)
    params = [param for param in model.parameters() if param.requires_grad]
    ids, labels = torch.randint(1, 40, (5, 7)), torch.tensor([0, 1, 0, 1, 1])

    def loss(rows):
        found = model(input_ids=ids[rows], attention_mask=torch.ones_like(ids[rows]))
        return torch.nn.functional.cross_entropy(found.logits, labels[rows])

    expected = clipped_sums(lambda i: loss(slice(i, i + 1)), params, 5, 0.5)
    clipper = Clipper(model, params, 0.5)
    loss(slice(None)).backward()
    for found, wanted in zip(clipper.sums(), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-5)
    assert all(float(wanted.abs().sum()) > 0 for wanted in expected)


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True},
        {"label_smoothing_factor": 0.1},
        {"gradient_checkpointing": True},
        {"max_steps": 6},
        {"dataloader_num_workers": 1},
        {"optim": "sgd"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_trainer(tmp_path, options):
    plan = {"plan": t.PLAN}
    if "max_steps" in options:
        plan = {"target_epsilon": 50.0, "target_delta": 1e-3, "sampling": "fixed",
                "mechanism": "bisr", "num_bands": 2}  # fmt: skip
    model = t.bert()
    model.bert.embeddings.requires_grad_(False)
    before = t.weights(model.bert.embeddings)
    run = t.trainer(tmp_path / "run", model, args=t.arguments(tmp_path / "run", **options), **plan)
    run.train()
    assert run.engine.steps_taken == options.get("max_steps", 16) == run.engine.plan.num_steps
    assert torch.equal(t.weights(model.bert.embeddings), before)
    assert not torch.equal(t.weights(model.classifier), t.weights(t.bert().classifier))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_size_of_a_piece_rounds_no_gradient(tmp_path, monkeypatch, kind):
    """Under autocast; a model in bfloat16 without it computes a mean in bfloat16 itself."""
    seen, clipped = set(), Clipper._clipped

    def seeing(clipper, calls, count):
        seen.update(call.summed for call in calls)
        return clipped(clipper, calls, count)

    monkeypatch.setattr(Clipper, "_clipped", seeing)
    folder = tmp_path / "run"
    args = t.arguments(folder, bf16=kind == torch.float32, max_steps=8)
    run = t.trainer(folder, t.bert().to(kind), args=args)
    run.train()
    assert seen == {kind == torch.float32}
    assert "backward" not in vars(run.accelerator)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_both_kinds_of_checkpoints_train_the_same(tmp_path):
    """Reentrant ones are what transformers 4 takes by default."""
    found = []
    for kind in (None, False, True):
        options = {"gradient_checkpointing_kwargs": {"use_reentrant": kind}}
        options["gradient_checkpointing"] = kind is not None
        folder = tmp_path / str(kind)
        args = t.arguments(folder, **options)
        run = t.trainer(folder, without_dropout(t.bert()), args=args, key=KEY)
        run.train()
        found.append(t.weights(run.model))
    assert torch.allclose(found[1], found[0], atol=1e-5)
    assert torch.allclose(found[2], found[0], atol=1e-5)


def test_an_empty_batch_is_a_step(tmp_path):
    run = t.trainer(
        tmp_path / "run", key=Key.from_bytes(bytes(range(1, 33))), train_dataset=t.texts(6),
        args=t.arguments(
            tmp_path / "run", per_device_train_batch_size=1, gradient_accumulation_steps=1,
            num_train_epochs=1,
        ),
        target_epsilon=50.0, target_delta=1e-3, mechanism="dp_sgd", sampling="balls-in-bins",
    )  # fmt: skip
    run.train()
    sizes = [len(run._batches.private._step_sampler.share(step)) for step in range(6)]
    assert 0 in sizes
    assert run.engine.steps_taken == 6


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_language_models_count_every_example_alike(tmp_path, kind):
    """The gradient is that of the loop over examples, however long the texts are."""
    model = t.gpt2()
    data = t.texts(labels="tokens")
    collate = DataCollatorForTokenClassification(t.tokenizer())
    if kind == "masked":
        from transformers import BertForMaskedLM

        torch.manual_seed(0)
        model = BertForMaskedLM(t.bert().config)
    run = t.trainer(tmp_path / "run", model, train_dataset=data, data_collator=collate)
    run.train()
    assert run.engine.steps_taken == 16
    shift = kind == "causal"
    assert losses.shift_of(model) is shift
    model.eval()
    some = [data[i] for i in range(4)]
    batch = collate(some)
    whole = losses.mean_over_examples(
        model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits,
        batch["labels"],
        shift=shift,
    )
    alone = [model(**collate([one])).loss for one in some]
    assert len({len(one["input_ids"]) for one in some}) > 1
    assert whole.item() == pytest.approx(torch.stack(alone).mean().item(), rel=1e-4)
    params = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(whole, params)
    sums = clipped_sums(lambda i: model(**collate([some[i]])).loss, params, 4, 1e9)
    for grad, total in zip(grads, sums, strict=True):
        assert torch.allclose(grad * 4, total, atol=1e-5)


def test_random_masking_is_no_reason_to_refuse(tmp_path):
    from transformers import BertForMaskedLM

    torch.manual_seed(0)
    words = t.tokenizer()
    words.add_special_tokens({"mask_token": "2"})
    data = t.texts().remove_columns("labels")
    collate = DataCollatorForLanguageModeling(words, mlm_probability=0.5)
    run = t.trainer(
        tmp_path / "run", BertForMaskedLM(t.bert().config), train_dataset=data,
        data_collator=collate,
    )  # fmt: skip
    run.train()
    assert run.engine.steps_taken == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_sampling_strategy": "group_by_length"}, "group_by_length"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size must be False"),
        ({"max_grad_norm": 0.0}, "must be positive"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last must be False"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen must be 'no'"),
    ],
)
def test_arguments_that_break_the_promise_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        t.trainer(tmp_path / "run", args=t.arguments(tmp_path / "run", **options))
    assert not (tmp_path / "run.key").exists()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n_gpu", 2, "DataParallel mode"),
        ("world_size", 2, "one process"),
        ("fp16", True, "use bf16=True"),
        ("deepspeed", "x.json", "must be left out"),
    ],
)
def test_machines_that_break_the_promise_are_refused(tmp_path, name, value, message):
    class Fake:
        def __getattr__(self, wanted):
            return value if wanted == name else getattr(args, wanted)

    args = t.arguments(tmp_path / "run")
    with pytest.raises(ValueError, match=message):
        refusals.check_arguments(Fake())


def test_what_mixes_examples_is_refused(tmp_path):
    def token_mean(outputs, labels, num_items_in_batch=None):
        return nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )

    tokens = t.texts(labels="tokens")
    padded = DataCollatorForTokenClassification(t.tokenizer())
    cases = [
        ("one row for each example", t.gpt2(), {"data_collator": DataCollatorWithFlattening()}),
        ("must be a mean over examples", t.gpt2(),
         {"data_collator": padded, "compute_loss_func": token_mean}),
        # Left padding moves the positions of GPT-2's words.
        ("must be a mean over examples", t.gpt2(),
         {"data_collator": DataCollatorForTokenClassification(t.tokenizer("left"))}),
    ]  # fmt: skip
    for number, (message, model, options) in enumerate(cases):
        place = tmp_path / f"run{number}"
        run = t.trainer(place, model, train_dataset=tokens, **options)
        with pytest.raises(ValueError, match=message):
            run.train()
        assert not place.with_name(place.name + ".key").exists()


def test_padding_without_a_mask_is_refused(tmp_path):
    class NoMask:
        def __init__(self):
            self.pad = DataCollatorWithPadding(t.tokenizer())

        def __call__(self, rows):
            found = self.pad(rows)
            return {name: found[name] for name in ("input_ids", "labels")}

    torch.manual_seed(0)
    model = t.bert()
    with torch.no_grad():  # so that its padding can be seen in its outputs
        for p in model.parameters():
            p.mul_(3.0)
    with pytest.raises(ValueError, match="must be a mean over examples"):
        t.trainer(tmp_path / "run", model, data_collator=NoMask()).train()


def test_the_budget_is_needed_and_kept(tmp_path):
    with pytest.raises(ValueError, match="give the budget"):
        t.trainer(tmp_path / "run", plan=None)
    with pytest.raises(ValueError, match="give the budget"):
        t.trainer(tmp_path / "run", plan=t.PLAN, target_epsilon=1.0, target_delta=1e-3)
    budget = {"target_delta": 1e-3, "mechanism": "bisr", "num_bands": 2, "sampling": "fixed"}
    run = t.trainer(tmp_path / "run", target_epsilon=20.0, **budget)
    run.train()
    assert run.engine.plan.epsilon == 20.0
    assert run.engine.plan.mechanism.workload.momentum == 0.9
    again = t.trainer(tmp_path / "run", target_epsilon=30.0, **budget)
    with pytest.raises(ValueError, match="must keep its budget"):
        again.train(resume_from_checkpoint=True)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ValueError, match="must be a checkpoint of a private run"):
        t.trainer(tmp_path / "run").train(resume_from_checkpoint=str(other))


def test_a_finished_run_is_named_with_the_remedies(tmp_path):
    """The second start of a script: a head that no seed fixed, or other settings."""
    place = tmp_path / "run"
    t.trainer(place).train()
    size = (place / "ledger").stat().st_size
    other = t.bert()
    with torch.no_grad():
        other.classifier.weight.add_(0.1)
    known = f"{place} has a run of 16 of 16 steps; pass another output_dir for a new run, or resume"
    with pytest.raises(ValueError, match="step 0 was released before with another") as caught:
        t.trainer(place, other).train()
    assert str(caught.value).startswith(known)
    assert caught.value.__suppress_context__
    budget = {"target_epsilon": 30.0, "target_delta": 1e-3}
    different = "differs in epsilon (was 8.0, is 30.0), which must be restored"
    with pytest.raises(ValueError, match=re.escape(different)) as caught:
        t.trainer(place, **budget).train()
    assert str(caught.value).startswith(known)
    other = t.arguments(place, max_grad_norm=2.0)
    with pytest.raises(ValueError, match=r"differs in max_grad_norm \(was 1.0, is 2.0\)"):
        t.trainer(place, args=other).train()
    # What only the ledger sees: the same budget with another mechanism.
    budget = {"target_epsilon": 8.0, "target_delta": 1e-3, "sampling": "fixed"}
    with pytest.raises(ValueError, match="ledger must belong to this run") as caught:
        t.trainer(place, mechanism="dp_sgd", **budget).train()
    assert str(caught.value).startswith(known)
    assert "plan (was" not in str(caught.value)
    assert (place / "ledger").stat().st_size == size
    # One that repeats it is the same release.
    again = t.trainer(place)
    again.train()
    assert again.engine.steps_taken == 16
    assert (place / "ledger").stat().st_size == size


@pytest.mark.parametrize(("publishes", "steps"), [("steps", 7), ("checkpoints", 0)])
def test_a_run_without_a_checkpoint_is_named_or_repeated(tmp_path, publishes, steps):
    place, key = tmp_path / "run", str(tmp_path / "key")
    args = t.arguments(place, save_strategy="no")
    options = {"args": args, "key": key, "publishes": publishes}
    with pytest.raises(KeyboardInterrupt):
        t.trainer(place, callbacks=[t.Stop()], **options).train()
    data = {"train_dataset": t.texts(36), "plan": None, "target_epsilon": 8.0}
    message = (
        f"has a run of {steps} of 16 steps and no checkpoint to resume it from; pass another "
        "output_dir and another key for a new run; that run differs in num_steps (was 16, is 12), "
        "num_examples (was 48, is 36)"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        t.trainer(place, target_delta=1e-3, **data, **options).train(resume_from_checkpoint=True)
    run = t.trainer(place, **options)
    run.train(resume_from_checkpoint=True)
    assert run.engine.steps_taken == 16
