"""What products of matrices round away: of their factors, and in their sums."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from corrnoise.torch.clipping.products import cudnn_rounds, precision

# What the sum rounds a factor by that is exact in the norm: bfloat16 in ``scaled``; float16, which
# is multiplied in float32, where that is cut to TF32.
_UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-22}


def _cut(step: float) -> float:
    """How much two products of factors that are cut to steps differ, at most, as a share of R.

    One in the norm and one in the sum, each of factors that are rounded to the nearest step or
    towards 0, as the kernel and the library like. The factor that is not multiplied by the clip
    factor is the same in both, so that its two values are a step apart, and those of the other are
    one and a half. The rest is for products of these errors, and for R of factors that are cut.
    """
    return 2.5 * step * (1.0 + 3.0 * step)


# Of float32, where matrix units cut it.
_TF32, _CUT_TO_BFLOAT16 = _cut(2.0**-10), _cut(2.0**-7)

# What a product that is added changes a sum by, at most, as a share of the absolute values so far:
# in float32, and in matrix units by the first number of the compute capability of a GPU. With k
# products at a time that are cut e bits behind float32, that is 2⁻²³(2⁻ᵉ + 1/k), by bit-accurate
# models of these units (Khattak and Mikaitis, arXiv 2512.07004, and for Ada arXiv 2510.15884): k
# is 4 or 8 and e = 1 in Ampere and Ada, 8 or 16 and e = 2 in Hopper and data centres' Blackwell.
# What is counted besides is for partial sums that are added in float32.
FLOAT32 = 2.0**-24
SUMS = {8: 2.0**-23, 9: 2.0**-24, 10: 2.0**-24}
_OTHERS = 3.0 * 2.0**-24  # as in Volta, where k = 4 and e = 0: the least that is known


@dataclass(frozen=True)
class Rounding:
    """How one processor rounds products of matrices of one type.

    Attributes:
        factors: what both factors are rounded by between the norm and the sum, as a share of R.
        sums: what each product that is added changes a sum by, as a share of the absolute values.
    """

    factors: float
    sums: float = FLOAT32

    @property
    def cut(self) -> bool:
        """Whether matrix units make the products."""
        return self.factors > 2.0**-20

    def added(self, terms: int) -> float:
        """γ: what a sum of so many products is off by, at most, as a share of the absolute values.

        That is T·s/(1 - T·s) for T products and s = ``sums``, in any order (Higham, "Accuracy and
        stability of numerical algorithms", 2002, section 3.1).

        Raises:
            ValueError: there are so many that the sum tells nothing.
        """
        share = self.sums * terms
        if share >= 0.5:
            raise ValueError(
                f"an example must have fewer than {int(0.25 / self.sums):,} positions in a layer, "
                f"got {terms:,} additions, whose errors could not be told from gradients: make "
                "pictures smaller or texts shorter. Nothing was released"
            )
        return share / (1.0 - share)


EXACT = Rounding(0.0)  # where what is measured is what is added


def matmul_rounding(factor: Tensor) -> Rounding:
    """Of matrix products of such factors."""
    return _rounding(factor, precision())


def convolution_rounding(factor: Tensor) -> Rounding:
    """Of convolutions whose norms are made by products, and whose sums in float32."""
    found = precision()
    if factor.is_cuda:
        # Matrix units make the norms of other types than float32, and cut their sums.
        units = factor.dtype != torch.float32 or cudnn_rounds()
        found = "high" if found == "highest" and units else found
    else:
        conv: Any = getattr(torch.backends.mkldnn, "conv", None)
        rounds = getattr(conv, "fp32_precision", "none") not in ("none", "ieee")
        found = "medium" if rounds else found
    return _rounding(factor.new_empty(0, dtype=torch.float32), found)


def _rounding(factor: Tensor, precision: str) -> Rounding:
    found = Rounding(unit(factor, precision))
    return Rounding(found.factors, sums_of_units(factor.device)) if found.cut else found


def unit(factor: Tensor, precision: str) -> float:
    """What the factors of a product are rounded by, at most, between the norm and the sum.

    float32 is cut to the bits of the matrix unit, in the norm and, times the clip factor, in the
    sum. bfloat16 and float16 are exact in the norm, and one factor is rounded in the sum. A setting
    other than "highest" allows TF32 on a GPU, and bfloat16 where it is "medium" or on the CPU;
    whether a processor does so, torch does not tell.

    Args:
        factor: on the device and of the type of both.
        precision: of products of float32.

    Raises:
        ValueError: torch may add products of float16 in float16.
    """
    if factor.is_cuda and factor.dtype != torch.float32:
        matmul: Any = torch.backends.cuda.matmul
        if factor.dtype == torch.float16 and getattr(matmul, "allow_fp16_accumulation", False):
            raise ValueError(
                "torch.backends.cuda.matmul.allow_fp16_accumulation must be False, got True: norms "
                "of float16 would be added up in float16, and too small. Nothing was released"
            )
        return _UNITS[factor.dtype]
    if precision == "highest":  # on the CPU products of all types are made in float32
        return _UNITS[torch.float32]
    return _TF32 if factor.is_cuda and precision == "high" else _CUT_TO_BFLOAT16


@functools.cache
def sums_of_units(device: torch.device) -> float:
    """``Rounding.sums`` of the matrix units of a device, or the most known where it is not."""
    if device.type != "cuda" or torch.version.hip is not None:
        return _OTHERS
    return SUMS.get(torch.cuda.get_device_capability(device)[0], _OTHERS)
