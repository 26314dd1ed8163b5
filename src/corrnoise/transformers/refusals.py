"""What Hugging Face's Trainer can do and a private run cannot: refused, one line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# Prompts that PEFT computes once for a whole batch.
_PROMPTS = ("PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING")
# What collators for packed rows add to a batch.
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "seq_lengths")


def check_arguments(args: Any) -> None:
    """Raise if training arguments ask for what a plan does not cover.

    Args:
        args: of the Trainer.
    """
    strategy = str(getattr(args, "train_sampling_strategy", "random")).lower()
    if getattr(args, "group_by_length", False) or "length" in strategy or "rebalance" in strategy:
        raise ValueError(
            "group_by_length and train_sampling_strategy='group_by_length' or 'batch_rebalance' "
            "must be left out: which examples share a batch would depend on the other examples, "
            "and the plan prices random batches; dynamic padding is fine without"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"one process must have one GPU, got {args.n_gpu} in DataParallel mode, which copies "
            "the model without its hooks; set CUDA_VISIBLE_DEVICES to one of them"
        )
    if args.world_size > 1:
        raise ValueError(
            f"the Trainer must run in one process, got {args.world_size}; for several use "
            "corrnoise.torch.PrivacyEngine with DistributedDataParallel or fully_shard"
        )
    if args.fp16:
        raise ValueError(
            "fp16 must be False: its loss scaling changes from step to step; use bf16=True"
        )
    if not args.max_grad_norm > 0:
        raise ValueError(
            f"max_grad_norm is the clip norm of each example's gradient and must be positive, got "
            f"{args.max_grad_norm}"
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size must be False: the plan has one batch size; choose "
            "per_device_train_batch_size, and raise gradient_accumulation_steps to keep the batch"
        )
    if args.dataloader_drop_last:
        raise ValueError(
            "dataloader_drop_last must be False: the plan draws its own batches, and no example "
            "is left out"
        )
    if str(getattr(args, "include_num_input_tokens_seen", "no")).lower() not in ("no", "false"):
        raise ValueError(
            "include_num_input_tokens_seen must be 'no': the number of tokens in private batches "
            "would be written beside the model without noise"
        )
    if getattr(args, "neftune_noise_alpha", None):
        raise ValueError(
            "neftune_noise_alpha must be left out: how much it adds depends on how long the other "
            "examples of a batch are"
        )
    if args.deepspeed or args.fsdp:
        raise ValueError(
            "deepspeed and fsdp must be left out; for sharded models use "
            "corrnoise.torch.PrivacyEngine with fully_shard"
        )


def check_model(model: Any) -> None:
    """Raise if a model, or adapters of PEFT in it, compute what is not of single examples.

    Args:
        model: to be trained.
    """
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ValueError(
            "output_router_logits must be False: the loss that balances the load of experts is "
            "computed over all examples of a batch, and is left out of private training; set "
            "model.config.output_router_logits = False"
        )
    for config in getattr(model, "peft_config", {}).values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind in _PROMPTS:
            raise ValueError(
                f"{kind} of PEFT computes its prompt once and repeats it for every example, so "
                "that gradients of single examples cannot be told apart; use PrefixTuningConfig or "
                "LoraConfig"
            )
        if kind == "ADALORA":
            raise ValueError(
                "ADALORA of PEFT adds a penalty on its weights to the loss, which is of no example "
                "and which clipping does not cover; use LoraConfig"
            )
        if getattr(config, "use_dora", False):
            raise ValueError(
                "use_dora of PEFT runs its adapters on whole weights, so that gradients of single "
                "examples cannot be told apart; use LoraConfig without it"
            )


class OneRowEach:
    """A collate function that must give one row for each example.

    Args:
        collate: the user's.
    """

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, examples: list[Any]) -> Any:
        """The batch of these examples.

        Raises:
            ValueError: several examples share a row, or one has several.
        """
        batch = self.collate(examples)
        found = rows(batch)
        packed = [name for name in _PACKED if name in batch] if isinstance(batch, Mapping) else []
        if found != len(examples) or packed:
            raise ValueError(
                f"data_collator must give one row for each example, got {found} rows for "
                f"{len(examples)} examples"
                + (f" and {', '.join(packed)}" if packed else "")
                + "; gradients of examples that are packed into one row cannot be clipped apart: "
                "pad them, for example with DataCollatorWithPadding"
            )
        return batch


def rows(batch: Any) -> int:
    """The first dimension of the first tensor of a batch; 0 where there is none."""
    values: Any = batch.values() if isinstance(batch, Mapping) else batch
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return len(value)
    return 0
