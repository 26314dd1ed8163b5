r"""The trade-off of memory and time: which past noise is stored, and which is regenerated.

For a C⁻¹ of p bands, with k model-sized float32 vectors of state:

    regenerate       k = 0        p draws a step
    lookahead m      k = m - 1    (p + m - 1)/m draws: m rows are computed at once from p + m - 1
                                  draws; one is used now and m - 1 are stored for their steps
    ring             1 ≤ k < p    p - k draws: the k newest z are read, one is written, and the
                                  older ones are regenerated

Any other C⁻¹ runs as a recursion with 1 draw a step and the state that its poles need.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Literal

from corrnoise.noise.filtering.filters import Filter

# The time of a draw for d indices, in units of the time to read d float32 values (half a copy): the
# slope between p = 4 and p = 16 in benchmarks/noise-h200.md. On a CPU a draw costs even more.
DRAW_COST = {20: 2.8, 12: 1.8, 8: 1.3}
# Arithmetic and memory traffic overlap, except for this fraction of the shorter of the two. This
# value fits the whole table best: within an eighth, except for lookahead, which takes up to a third
# longer than predicted.
EXPOSED = 0.2
LARGEST_LOOKAHEAD = 8  # a GPU thread keeps 16 sums per row in registers


@dataclass(frozen=True)
class Scheme:
    """How past noise is kept between steps.

    Attributes:
        kind: "regenerate", "lookahead", "ring" or "recursion".
        num_vectors: the model-sized float32 vectors of state.
        draws_per_step: the number of normals drawn per index and step, on average.
        lookahead: m, the number of rows computed at once; 1 except for "lookahead".

    >>> Scheme("lookahead", num_vectors=2, draws_per_step=2.0, lookahead=3).state_bytes(1000)
    8000
    """

    kind: Literal["regenerate", "lookahead", "ring", "recursion"]
    num_vectors: int
    draws_per_step: float
    lookahead: int = 1

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of state for each parameter."""
        return 4 * self.num_vectors

    def state_bytes(self, num_parameters: int) -> int:
        """Bytes of state for a model, or for a shard of one."""
        return self.bytes_per_parameter * num_parameters


def candidates(num_terms: int) -> list[Scheme]:
    """Every scheme for a C⁻¹ of p = ``num_terms`` bands, least memory first."""
    p = num_terms
    schemes = [Scheme("regenerate", 0, float(p))]
    if p > 1:
        schemes += [
            Scheme("lookahead", m - 1, (p + m - 1) / m, m) for m in range(2, LARGEST_LOOKAHEAD + 1)
        ]
        schemes += [Scheme("ring", s, float(p - s)) for s in range(1, p)]
    return sorted(schemes, key=lambda scheme: scheme.num_vectors)


def step_cost(scheme: Scheme, spec: Filter, rounds: int) -> float:
    """The time of a step, in units of the time to read one vector."""
    draw, m = DRAW_COST[rounds], scheme.lookahead
    if scheme.kind in ("ring", "recursion"):  # the state is read, and each section writes a vector
        traffic = 2.0 + scheme.num_vectors + spec.num_sections
        return _together(scheme.draws_per_step * draw, traffic)
    making = _together(scheme.draws_per_step * m * draw, 2.0 + (m - 1))
    return (making + (m - 1) * 3.0) / m


def _together(arithmetic: float, traffic: float) -> float:
    return max(arithmetic, traffic) + EXPOSED * min(arithmetic, traffic)


def relative_cost(scheme: Scheme, spec: Filter, rounds: int) -> float:
    """``step_cost`` relative to independent noise, which makes one draw and reads no state.

    >>> import corrnoise as cn
    >>> spec = Filter.of(cn.mechanisms.bisr(cn.workloads.prefix_sum(100), num_bands=4))
    >>> round(relative_cost(choose(spec, memory=0, rounds=20), spec, rounds=20), 2)
    3.62
    """
    return step_cost(scheme, spec, rounds) / _together(DRAW_COST[rounds], 2.0)


def choose(spec: Filter, memory: float, rounds: int) -> Scheme:
    """The fastest scheme whose state fits ``memory`` vectors; a recursion has only one scheme.

    >>> import corrnoise as cn
    >>> spec = Filter.of(cn.mechanisms.bisr(cn.workloads.prefix_sum(100), num_bands=4))
    >>> [choose(spec, memory, rounds=20).kind for memory in range(4)]
    ['regenerate', 'lookahead', 'ring', 'ring']
    >>> choose(spec, memory=2, rounds=20).draws_per_step
    2.0
    """
    if (
        isinstance(memory, bool)
        or not isinstance(memory, numbers.Real)
        or not math.isfinite(memory)
        or memory < 0
    ):
        raise ValueError(
            "memory must be a finite number of model-sized vectors, at least 0, "
            f"got {memory!r}; 0 stores nothing"
        )
    if spec.num_terms is None:
        return Scheme("recursion", spec.num_past, 1.0)
    fitting = [s for s in candidates(spec.num_terms) if s.num_vectors <= memory]
    return min(fitting, key=lambda s: step_cost(s, spec, rounds))
