"""The registry of families: everything that differs between families is data of an entry.

A family has a factory, a name, the meaning of its size, its candidates for a planner, and a label.
It is defined in the file of its factory. ``register`` adds a new one, which all other code then
finds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from corrnoise import _checks as checks
from corrnoise._progress import Progress
from corrnoise.mechanisms.mechanism import Mechanism
from corrnoise.participation import Participation
from corrnoise.workloads import Workload

Size = int | Literal["best"] | None
# What amplification by sampling favours in a strategy matrix. "none": nothing. "bins": short means
# of bins that are far apart, so a C that decays fast. "bands": few bands of C. "independent": only
# C = I is allowed.
Amplification = Literal["none", "bins", "bands", "independent"]

# The symbol of a size, printed in front of its value.
_SYMBOLS = {"num_bands": "p", "num_buffers": "d"}


@dataclass(frozen=True)
class Question:
    """The problem that a planner wants candidates for.

    Attributes:
        workload: A.
        participation: n, b, k.
        amplification: what the sampling favours in a strategy matrix.
        epsilon: ε of the budget.
        delta: δ of the budget.
        memory: the model-sized vectors that the noise may keep; ``None`` is no limit.
        num_bands: the only p to try, if the user asked for one.
        named: whether the user asked for this family by name.
    """

    workload: Workload
    participation: Participation
    amplification: Amplification
    epsilon: float
    delta: float
    memory: float | None = 0
    num_bands: int | None = None
    named: bool = False


@dataclass(frozen=True)
class Candidate:
    """A mechanism that a planner may build.

    Attributes:
        size: the size, as in ``Family.build``.
        build: a function without arguments that builds the mechanism.
        note: a remark that is printed after the size, such as ", amplified".
    """

    size: int | None
    build: Callable[[], Mechanism]
    note: str = ""

    @staticmethod
    def amplified(
        question: Question, factory: Callable[..., Mechanism], num_bands: int | None = None
    ) -> Candidate:
        """A mechanism whose coefficients are chosen for a budget under amplification.

        Args:
            question: the planner's question.
            factory: builds the mechanism from workload, participation, ``epsilon`` and ``delta``,
                and from ``num_bands`` if that is given.
            num_bands: the size of the candidate, if its family has sizes.
        """
        size = {} if num_bands is None else {"num_bands": num_bands}
        build = functools.partial(
            factory,
            question.workload,
            question.participation,
            epsilon=question.epsilon,
            delta=question.delta,
            **size,
        )
        return Candidate(num_bands, build, ", amplified")


@dataclass(frozen=True)
class Family:
    """A family of mechanisms: its factory, and all that other code needs to know about it.

    ``docs/extending.md`` adds one.

    Attributes:
        name: the name that users write in code.
        label: the name in reports.
        factory: builds a mechanism from a workload, a participation and, as a keyword, a size.
        sizes: the sizes that a planner tries; none if building them would take too long.
        size: the factory's keyword for the size; ``None`` if the family has no size.
        optional: whether the size may be left out.
        usual: the default size for a participation.
        extra: further candidates of a planner.
        reports: whether the factory takes long and has an argument ``progress``.

    >>> import corrnoise as cn
    >>> bisr = cn.mechanisms.get("bisr")
    >>> bisr.label, bisr.build(cn.workloads.prefix_sum(100), cn.Participation(100, 25, 4), 4)
    ('BISR', bisr(prefix_sum(100), num_bands=4))
    """

    name: str
    label: str
    factory: Callable[..., Mechanism]
    sizes: Callable[[Question], Iterable[int | None]]
    size: Literal["num_bands", "num_buffers"] | None = None
    optional: bool = False
    usual: Callable[[Participation], int | None] = field(default=lambda participation: None)
    extra: Callable[[Question], Iterable[Candidate]] = field(default=lambda question: ())
    reports: bool = False

    @property
    def banded(self) -> bool:
        """Whether its size is a number of bands that must be chosen."""
        return self.size == "num_bands" and not self.optional

    def build(
        self,
        workload: Workload,
        participation: Participation,
        size: Size = None,
        *,
        progress: Progress | bool | None = None,
    ) -> Mechanism:
        """Build the mechanism of this size; ``progress`` is called if the factory takes long."""
        if self.size is None:
            if size not in (None, 1):
                raise ValueError(
                    f"num_bands must be left out for {self.name}, which has no size, got {size}"
                )
            return self.factory(workload, participation)
        if size is None and not self.optional:
            raise ValueError(f"{self.size} must be given for {self.name}, got None; try 4")
        more = {"progress": progress} if self.reports else {}
        return self.factory(workload, participation, **{self.size: size}, **more)

    def candidates(self, question: Question) -> Iterable[Candidate]:
        """The candidates that a planner tries, in the order of sizes."""
        asked = question.num_bands is not None and self.banded
        for size in [question.num_bands] if asked else self.sizes(question):
            yield Candidate(
                size,
                lambda size=size: self.build(question.workload, question.participation, size),
            )
        yield from self.extra(question)

    def title(self, size: int | None) -> str:
        """Name and size, as printed in tables."""
        return self.name + self._sized(size)

    def shown(self, mechanism: Mechanism) -> str:
        """The label and the size of one of the family's mechanisms, for reports."""
        size = None
        if self.banded:
            size = min(mechanism.strategy_bands, mechanism.noising_bands)
        elif self.size == "num_buffers":
            size = mechanism.num_buffers
        return self.label + self._sized(size)

    def _sized(self, size: int | None) -> str:
        return "" if size is None or self.size is None else f" {_SYMBOLS[self.size]}={size}"


_KNOWN: dict[str, Family] = {}


def register(*families: Family) -> None:
    """Register families by name; a new family replaces an old one of the same name."""
    for family in families:
        _KNOWN[family.name] = family


def families() -> tuple[Family, ...]:
    """All families, in the order in which tables show them."""
    return tuple(_KNOWN.values())


def names() -> tuple[str, ...]:
    """The names of all families.

    >>> "bisr" in names()
    True
    """
    return tuple(_KNOWN)


def get(name: str) -> Family:
    """The family of this name; an unknown name raises a ``ValueError``.

    >>> get("blt").size
    'num_buffers'
    """
    return _KNOWN[checks.choice("mechanism", name, names())]


def shown(mechanism: Mechanism) -> str:
    """The label and the size of any mechanism, for reports.

    >>> import corrnoise as cn
    >>> shown(cn.mechanisms.bisr(cn.workloads.prefix_sum(100), num_bands=4))
    'BISR p=4'
    """
    family = _KNOWN.get(mechanism.name)
    return mechanism.name if family is None else family.shown(mechanism)


def build(
    name: str,
    workload: Workload,
    participation: Participation,
    size: Size = None,
    *,
    progress: Progress | bool | None = None,
) -> Mechanism:
    """Build a mechanism by the name of its family, for choices at run time.

    Args:
        name: one of ``names()``.
        workload: A.
        participation: n, b, k; BSR and BISR use it only for the size "best".
        size: p of the banded families ("best" for BISR alone) and of "dense", where it may be
            left out; the number of buffers of "blt"; nothing for "dp_sgd" and "lambda_cgd".
        progress: for "dense", which takes minutes at a thousand steps; True for a bar on the
            terminal.

    >>> import corrnoise as cn
    >>> build("bisr", cn.workloads.prefix_sum(100), cn.Participation(100, 25, 4), 4)
    bisr(prefix_sum(100), num_bands=4)
    """
    return get(name).build(workload, participation, size, progress=progress)
