"""What secure mode covers: a run whose sums and releases are computed without rounding.

``grid_sums`` adds up, ``noise.exact`` releases, and ``docs/proofs/floating-point.md`` has the
theorem.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from corrnoise.planning import Plan
from corrnoise.torch.options import Options
from corrnoise.torch.processes import Processes
from corrnoise.torch.without_noise import is_private

MODES = ("hooks", "functorch", "ew")  # that store the gradient of each example

_LEAST = 2.0**-100  # clip norm: all products are far from the ends of float64


def check(
    plan: Plan, params: Sequence[nn.Parameter], processes: Processes, options: Options
) -> None:
    """Raise unless secure mode covers the run.

    Args:
        plan: of the run.
        params: the trained ones.
        processes: that train the model.
        options: with the mode of taking gradients decided.
    """
    mode = options.grad_sample_mode
    devices = sorted({str(param.device) for param in params})
    reason = ""
    if not is_private(plan.calibration):
        reason = "a run with noise, got noise_multiplier=0; give it noise"
    elif mode not in MODES:
        reason = (
            f"the gradient of each example, which grad_sample_mode={mode!r} does not store; use "
            f"one of {', '.join(MODES)}"
        )
    elif processes.distributed:
        reason = f"one process, got {processes.world_size}; train in one"
    elif not _LEAST <= options.clip_norm <= 1.0 / _LEAST:
        reason = f"a clip norm in [2^-100, 2^100], got {options.clip_norm:g}; scale the loss"
    elif len(devices) > 1:
        reason = f"one device, got {', '.join(devices)}; move the model"
    elif options.noise_generator is not None:
        reason = "the noise of the key, got noise_generator; leave it out"
    elif plan.memory > 0:
        reason = f"noise that is regenerated, got memory={plan.memory:g}; use memory=0"
    elif plan.mechanism.recursive:
        reason = (
            f"a banded C⁻¹, got {plan.mechanism!r}, whose noise is a recursion; use dp_sgd, bisr, "
            "bifr, band_inv_mf or lambda_cgd"
        )
    if reason:
        raise ValueError(f"secure_mode needs {reason}, or secure_mode=False")
