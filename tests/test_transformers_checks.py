"""What the Trainer looks at before its first step: losses, collators, buffers and arguments."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import texts as t
from datasets import Dataset
from training import KEY
from transformers import (
    BertForQuestionAnswering,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    default_data_collator,
)

from corrnoise.noise import Key
from corrnoise.transformers import Trainer, losses

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*pin_memory.*:UserWarning"
)
PAD, TOKENS = (
    DataCollatorWithPadding(t.tokenizer()),
    DataCollatorForTokenClassification(t.tokenizer()),
)
ALONE = "must be a mean over examples, each by itself"


def weighted(outputs, labels, num_items_in_batch=None):
    """The mean over a batch with weights of classes, by the sum of its weights."""
    return nn.functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 9.0]))


class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        return weighted(model(**inputs), labels)


class Centred(nn.Module):
    """Takes the mean of the batch away, in training alone."""

    def forward(self, x):
        return x - x.mean(0) if self.training else x


class Remembers(nn.Module):
    """Keeps a mean of what it saw."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
        return x


def joined(rows):
    """Each text with that of another example behind it."""
    pairs = [r["input_ids"] + rows[i - 1]["input_ids"] for i, r in enumerate(rows)]
    return PAD(
        [
            {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": row["labels"]}
            for ids, row in zip(pairs, rows, strict=True)
        ]
    )


def with_pooler(part):
    model = t.bert()
    model.bert.pooler = nn.Sequential(model.bert.pooler, part)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: t.trainer(p, kind=Weighted, plan=t.PLAN), ALONE),
        (lambda p: t.trainer(p, compute_loss_func=weighted), ALONE),
        (lambda p: t.trainer(p, data_collator=joined), ALONE),
        (lambda p: t.trainer(p, with_pooler(Centred())), ALONE),
        (lambda p: t.trainer(p, with_pooler(Remembers())), "into buffers, but .*mean"),
    ],
    ids=["override", "class-weights", "collator", "training-mode", "buffer"],
)
def test_what_mixes_examples_is_refused_wherever_it_is(tmp_path, make, message):
    run = make(tmp_path / "run")
    before = t.weights(run.model)
    with pytest.raises(ValueError, match=message):
        run.train()
    assert torch.equal(t.weights(run.model), before)
    assert not (tmp_path / "run" / "ledger").exists()


def test_examples_of_every_label_are_looked_at(tmp_path):
    """IMDB's reviews are sorted by label: the first ones have one alone."""
    rows = sorted(t.texts().to_list(), key=lambda row: row["labels"])
    with pytest.raises(ValueError, match=ALONE):
        t.trainer(tmp_path / "run", train_dataset=rows, compute_loss_func=weighted).train()


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_formatted_datasets_are_looked_at_as_plain_ones(tmp_path, kind):
    """Their labels are tensors without dimensions, which have ``__len__`` and no length."""
    rows = sorted(t.texts().to_list(), key=lambda row: row["labels"])
    data = Dataset.from_list(rows).with_format(kind)
    plain = losses.picked(rows)
    assert [list(row["input_ids"]) for row in losses.picked(data)] == [
        row["input_ids"] for row in plain
    ]
    run = t.trainer(tmp_path / "run", train_dataset=data, key=KEY)
    run.train()
    assert run.engine.steps_taken == 16
    other = t.trainer(tmp_path / "other", train_dataset=data, compute_loss_func=weighted)
    with pytest.raises(ValueError, match=ALONE):
        other.train()
    again = t.trainer(tmp_path / "again", train_dataset=rows, key=KEY)
    again.train()
    assert torch.equal(t.weights(run.model), t.weights(again.model))


def test_long_examples_far_behind_are_looked_at(tmp_path):
    class TokenMean(type(t.gpt2())):  # a kind that we do not know: its own loss counts
        pass

    rows = [{**row, "labels": row["input_ids"]} for row in t.texts(400).to_list()]
    for row in rows[:300]:
        for name in row:
            row[name] = (row[name] * 4)[:4]
    model = TokenMean(t.gpt2().config)
    with pytest.raises(ValueError, match=ALONE):
        t.trainer(
            tmp_path / "run", model, train_dataset=rows, data_collator=TOKENS, plan=None,
            target_epsilon=8.0, target_delta=1e-3, sampling="fixed", mechanism="bisr",
        ).train()  # fmt: skip


def padded(row, size=16):
    """A row with the padding in the dataset, as ``padding="max_length"`` makes it."""
    ids = row["input_ids"]
    rest = [0] * (size - len(ids))
    mask = [1] * len(ids) + rest
    return {
        "input_ids": ids + rest,
        "attention_mask": mask,
        "start_positions": 1,
        "end_positions": 2,
    }


def no_text(rows, label):
    rows[5] = {"input_ids": [], "attention_mask": [], "labels": label}
    return rows


def no_labels():
    rows = t.texts(labels="tokens").to_list()
    for row in rows[:-1]:
        row["labels"] = [-100] * len(row["labels"])
    return rows


@pytest.mark.parametrize(
    ("model", "data", "collator"),
    [
        (lambda: BertForQuestionAnswering(t.bert().config),
         lambda: list(map(padded, t.texts())), default_data_collator),
        (t.gpt2, lambda: no_text(t.texts(labels="tokens").to_list(), []), TOKENS),
        (t.bert, lambda: no_text(t.texts().to_list(), 0), PAD),
        (t.gpt2, no_labels, TOKENS),
    ],
    ids=["padding in the dataset", "an empty text", "an empty text with a class", "no labels"],
)  # fmt: skip
def test_what_treats_examples_apart_is_taken(tmp_path, model, data, collator):
    run = t.trainer(tmp_path / "run", model(), train_dataset=data(), data_collator=collator)
    run.train()
    assert run.engine.steps_taken == 16


def test_a_model_that_stays_in_evaluation_mode_is_trained_with_the_loss_of_training(tmp_path):
    """The loss of language models has every example count alike, not every token."""
    model = t.gpt2().eval()
    model.train = lambda mode=True: model
    data = {"train_dataset": t.texts(labels="tokens"), "data_collator": TOKENS}
    run = t.trainer(tmp_path / "run", model, key=KEY, **data)
    run.train()
    plain = t.gpt2()
    for part in plain.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("dropout", "attn_pdrop", "resid_pdrop"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    again = t.trainer(tmp_path / "again", plain, key=KEY, **data)
    again.train()
    assert torch.allclose(t.weights(model), t.weights(plain), atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.01})}]
)
def test_an_interrupted_trainer_trains_on(tmp_path, options):
    """As in a notebook: Ctrl-C, then the same cell again."""
    key = Key.from_bytes(bytes(range(1, 33)))
    whole = t.trainer(tmp_path / "whole", key=key, **options)
    whole.train()
    run = t.trainer(tmp_path / "run", key=key, callbacks=[t.Stop()], **options)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.train(resume_from_checkpoint=True)
    assert torch.equal(t.weights(run.model), t.weights(whole.model))
    with pytest.raises(ValueError, match="resume from its checkpoint"):
        run.train()


def test_a_given_optimizer_serves_one_run(tmp_path):
    model = t.bert()
    given = torch.optim.SGD(model.parameters(), lr=0.01)
    run = t.trainer(tmp_path / "run", model, optimizers=(given, None), callbacks=[t.Stop()])
    with pytest.raises(KeyboardInterrupt):
        run.train()
    with pytest.raises(ValueError, match="give optimizer_cls_and_kwargs"):
        run.train(resume_from_checkpoint=True)
    assert run.private_engine.steps_taken == 7


class Stream(IterableDataset):
    def __iter__(self):
        return iter(t.texts().to_list())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_dataset": Stream()}, "must have indices, got an IterableDataset"),
        ({"args": {"num_train_epochs": 6}}, "not be longer than its plan, 16 steps, got 24"),
        (
            {"args": {"max_steps": 3}, "plan": None, "target_epsilon": 8.0, "target_delta": 1e-3},
            "at least one epoch, 4 steps, got 3",
        ),
        (
            {"args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6}},
            r"gradient_accumulation_steps must be 12, the plan's batch size, got 4 \* 6 = 24;",
        ),
        (
            {"args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}},
            r"must be 12, the plan's batch size, got 4 \* 1 = 4; change them or make",
        ),
        ({"train_dataset": t.texts(36)}, "must have the plan's 48 examples, got 36; restore it"),
        ({"args": {"neftune_noise_alpha": 5.0}}, "neftune_noise_alpha must be left out"),
    ],
    ids=["stream", "long", "short", "batch", "physical batch", "examples", "neftune"],
)
def test_first_errors_name_the_remedy(tmp_path, options, message):
    place = tmp_path / "run"
    args = t.arguments(place, **options.pop("args", {"max_steps": 4}))
    with pytest.raises(ValueError, match=message):
        t.trainer(place, args=args, **options).train()
    assert not place.with_name("run.key").exists()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("PromptTuningConfig", {"num_virtual_tokens": 4}, "PROMPT_TUNING .* use PrefixTuningConf"),
        ("AdaLoraConfig", {"target_modules": ["query"], "total_step": 9}, "ADALORA .* LoraConfig"),
        ("LoraConfig", {"target_modules": ["query"], "use_dora": True}, "use_dora .* without it"),
    ],
)
def test_adapters_that_do_not_treat_examples_apart_are_refused(tmp_path, kind, options, message):
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="SEQ_CLS", **options)
    with pytest.raises(ValueError, match=message):
        t.trainer(tmp_path / "run", peft.get_peft_model(t.bert(), config)).train()


def test_the_load_balancing_of_experts_is_refused(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=16, num_local_experts=2, output_router_logits=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"set model\.config\.output_router_logits = False"):
        t.trainer(tmp_path / "run", MixtralForCausalLM(config)).train()


def test_a_training_step_of_ones_own_gets_the_pieces_of_a_step(tmp_path):
    class Counting(Trainer):
        count = 0

        def training_step(self, model, inputs, *args, **options):
            self.count += sum(len(piece["labels"]) for piece in inputs)
            return super().training_step(model, inputs, *args, **options)

    class Mistaken(Trainer):
        def training_step(self, model, inputs, *args, **options):
            return super().training_step(model, inputs["labels"], *args, **options)

    run = t.trainer(tmp_path / "counting", kind=Counting, plan=t.PLAN)
    run.train()
    assert run.count == t.SIZE * t.EPOCHS
    with pytest.raises(TypeError, match=r"inputs\['labels'\]: .* give them to super"):
        t.trainer(tmp_path / "mistaken", kind=Mistaken, plan=t.PLAN).train()


def test_the_working_folder_can_be_the_output(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    run = t.trainer(".")
    run.train()
    assert (tmp_path / "run.key").exists()
    assert (tmp_path / "run" / "privacy-statement.txt").exists()
