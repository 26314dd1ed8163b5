"""Whether the loss of a loop adds up the losses of single examples, as clipping each of them needs.

The engine sees a model and the gradients that come back to it, but not what a loop computes in
between. Autograd knows: when ``backward`` is called, the graph of the loss is read, and
differentiated twice. No number of the loop changes.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corrnoise.torch.clipping import loss_terms
from corrnoise.torch.clipping.loss_graph import LossGraph, mark, mark_mixed
from corrnoise.torch.clipping.loss_twice import coupled

_LOOKS = 3  # batches that are looked at: one may have no padding
_LARGEST = 2**26  # numbers of outputs that are differentiated twice: a few times their memory
_LARGE = 2**22  # of those that are once only
_CALLS = 100  # of ``backward`` until nobody waits any longer for a loss of the model

MIXED = (
    "the loss must be a mean or a sum over examples, each by itself, but {why}. Take the loss of "
    "each example, as with reduction='none', and then the mean over the batch; if this was a "
    "coincidence, PrivacyEngine.check_loss(loss, *batch) confirms the loss: nothing was released"
)
_REDUCED = (
    "the loss must be a {told} over the examples of a batch, as loss_reduction={told!r} says, but "
    "it is a {found}, so that the gradient of each example would {done} with the size of the "
    "batch, or of its piece, {examples} here, before it is clipped. Take the {told}, or pass "
    "loss_reduction={found!r}: nothing was released"
)
_CLASSES = (
    "torch's cross entropy with weights of classes divides by the weights of a whole batch, so "
    "that the class of one example changes the gradients of others"
)
_PARTS = (
    "it is a mean over {count:g} parts of {rows} examples, such as tokens without padding, so that "
    "the length of one example changes the gradients of others"
)
_DIVISOR = (
    "it is divided by {now:g} for a batch of {rows} where a batch of {before} had {then:g}, as a "
    "mean over the tokens of a batch is: one example changes the gradients of others"
)
_TABLE = (
    "each example meets all others in a table of {rows} times {rows}, as by distances, or by "
    "outputs (n, 1) and targets (n,)"
)
_ORDER = "it takes the largest, the smallest or sorted ones of all examples ({name})"
_OWN = (
    "it is, or has in it, a number of the model that is no sum over examples: what one half of a "
    "batch adds to it changes with the other half, as in the load balancing of experts "
    "(output_router_logits=False leaves that out) or a mean over all tokens"
)
_COUPLED = "the gradients of some examples change with what the model gives for others"


class _Form(NamedTuple):
    """What a loss is like.

    Attributes:
        rows: of its batch.
        divisors: what it is divided by, with the names of the nodes that do it.
        terms: what it adds up, each a "mean" or a "sum", and what that is multiplied by.
    """

    rows: int
    divisors: list[tuple[str, float]]
    terms: list[tuple[str, float]]

    def differs(self, before: _Form) -> str:
        """Why what divides a loss follows the examples, if that shows beside another batch."""
        if [name for name, _ in self.divisors] != [name for name, _ in before.divisors]:
            return ""
        for (_, now), (_, old) in zip(self.divisors, before.divisors, strict=True):
            steps = now == round(now) == old + 1  # a number of steps
            if not (steps or _near(now, old) or _near(now * before.rows, old * self.rows)):
                return _DIVISOR.format(now=now, rows=self.rows, before=before.rows, then=old)
        return ""

    def told(self, before: _Form) -> set[str]:
        """What the terms are over all examples, each a "mean" or a "sum".

        A factor may be the size of a batch: what it is shows beside a batch of another size.
        """
        found = {kind for kind, factor in self.terms if factor == 1.0}
        kinds = [kind for kind, _ in self.terms]
        if self.rows == before.rows or kinds != [kind for kind, _ in before.terms]:
            return found
        for (kind, now), (_, old) in zip(self.terms, before.terms, strict=True):
            other = "sum" if kind == "mean" else "mean"
            sizes = (before.rows, self.rows) if kind == "mean" else (self.rows, before.rows)
            if _near(now, old):
                found.add(kind)
            elif _near(now * sizes[0], old * sizes[1]):
                found.add(other)
        return found


class LoopLoss:
    """Looks at the losses of a loop's first three batches of several examples, and never again.

    A loss is refused, before ``backward`` computes anything, if

    - the gradients of some examples change with the outputs for others: that block of the second
      derivative is not zero;
    - it is, or has in it, a single number of the model that is no sum over examples;
    - torch's cross entropy divides by weights of classes, or by a number of targets that is no
      multiple of the number of examples;
    - what it is divided by is neither the same for all batches nor proportional to their sizes;
    - all examples meet in a table, of differences or distances;
    - it takes the largest, the smallest or sorted ones of numbers of all examples;
    - it is a sum over all examples where a mean was told, or a mean where a sum was told.

    What is refused does mix examples, but for coincidences such as as many targets as examples. A
    sum that is clipped as a mean does so where sizes of batches vary: each size multiplies the
    gradients of all examples before they are clipped. Not all that mixes is refused: what a loop
    computes from targets alone is seen only where it divides the loss, straight lines such as
    hinges between two examples have no second derivative, and functions that torch does not know,
    compiled ones among them, are not differentiated.

    Args:
        mean: whether it was told to be a mean over examples, else a sum.
        views: rows of a batch for each example, one after the other.
    """

    def __init__(self, *, mean: bool = True, views: int = 1) -> None:
        self._told, self._views = "mean" if mean else "sum", views
        self._left, self._calls = _LOOKS, _CALLS
        self._rows = 0  # of a batch that is looked at
        self._sign = object()  # of what the model gives until a loss of it was seen
        self._outputs: list[tuple[weakref.ref[Tensor], int]] = []  # and hooks that they had
        self._seen = 0  # losses of these outputs
        self._before: dict[int, _Form] = {}  # each of the losses of the last batch
        self._apart: set[tuple[str, ...]] = set()  # losses that were differentiated

    def starts(self, rows: int) -> None:
        """The model starts on a batch.

        Args:
            rows: of the batch; 0 if it is not known.
        """
        if self._seen:
            self._left, self._seen, self._sign, self._outputs = self._left - 1, 0, object(), []
        several = rows >= 2 * self._views and rows % self._views == 0
        self._rows = rows if several and self._left else 0
        if not self._left:
            self.close()

    def gives(self, outputs: Sequence[Tensor], mixed: Sequence[int] = ()) -> None:
        """The model, or a trained layer of it, has given outputs for the batch.

        Those of layers count where a loss is computed from what the model does not return, or
        returns in an object of its own, and where the model gives the loss itself.

        Args:
            outputs: its floating-point tensors.
            mixed: which of them are single numbers that are no sums over examples.
        """
        if self._rows:
            mark_mixed([outputs[i] for i in mixed if i < len(outputs)], self._sign)
        many = [each for each in outputs if each.dim()]  # a single number is a loss
        if self._rows and many and not _moved_away():
            mark(many, self._sign, self._rows)
            alive = [(ref, had) for ref, had in self._outputs if ref() is not None]
            self._outputs = alive + [(weakref.ref(each), _hooks(each)) for each in many]
            _watch(self)

    def close(self) -> None:
        """Look at no loss any more."""
        self._left, self._rows, self._outputs = 0, 0, []
        _leave(self)

    def see(self, roots: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """``backward`` is called.

        Raises:
            ValueError: the loss mixes the examples of a batch.
        """
        self._calls -= 1
        why = None
        with suppress(Exception):  # of losses that cannot be read
            if self._outputs and not _moved_away() and not _captured():
                why = self._objection(roots, grads)
        if why:
            self._seen -= 1
            raise ValueError(why)
        if not self._calls:
            self.close()

    def _objection(self, roots: Sequence[Tensor], grads: Sequence[Tensor | None]) -> str | None:
        """What is wrong with a loss, if that is seen."""
        loss = LossGraph.follow(roots, grads, self._sign, views=self._views)
        if loss is None:
            return None
        self._seen += 1
        now = _Form(loss.rows, loss_terms.divisors(loss), loss_terms.reductions(loss))
        before = self._before.get(self._seen, now)
        why = self._mixes(loss) or now.differs(before)
        if not why and self._moves(loss):
            why = _COUPLED
        if not why and loss.mixed(self._sign):
            why = _OWN
        if why:
            return MIXED.format(why=why)
        if now.told(before) - {self._told}:
            other, done = ("sum", "grow") if self._told == "mean" else ("mean", "shrink")
            examples = loss.rows // self._views
            return _REDUCED.format(told=self._told, found=other, done=done, examples=examples)
        self._before[self._seen] = now  # not of a loss that is refused, which may come again
        return None

    def _mixes(self, loss: LossGraph) -> str | None:
        """Why a loss is not one of each example by itself, if its graph shows that."""
        if loss_terms.class_weights(loss):
            return _CLASSES
        if count := loss_terms.parts(loss):
            return _PARTS.format(count=count, rows=loss.rows)
        if loss_terms.table(loss):
            return _TABLE.format(rows=loss.rows)
        if name := loss_terms.order(loss):
            return _ORDER.format(name=name)
        return None

    def _moves(self, loss: LossGraph) -> bool:
        """Whether gradients of some examples change with outputs for others.

        Hooks of the user's would be called once more.
        """
        known = [(each, had) for ref, had in self._outputs if (each := ref()) is not None]
        outputs = [(x, had) for x, had in known if (x.grad_fn, x.output_nr) in loss.outputs]
        given = {id(each) for each, _ in outputs}
        outputs += [(root, 0) for root in loss.roots if id(root) not in given]
        if any(_hooks(each) > had for each, had in outputs):
            return False
        names = tuple(node.name() for node in loss.nodes)
        found = None
        with suppress(Exception):  # of losses that cannot be differentiated twice
            found = coupled(loss, _LARGE if names in self._apart else _LARGEST)
        if found is False:
            self._apart.add(names)
        return bool(found)


def _near(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=1e-5)


def _hooks(tensor: Tensor) -> int:
    """How many functions are called with the gradient of a tensor."""
    hooks: Any = tensor._backward_hooks
    return len(hooks or ()) + (tensor.grad_fn is not None and tensor.retains_grad)


def _moved_away() -> bool:
    """Whether somebody keeps what autograd saves elsewhere, and may give it back once alone.

    Torch's own functions, checkpoints among them, give it back as often as they are asked.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    return hooks is not None and not str(hooks[1].__module__).startswith("torch.")


def _captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


# Torch has no hook for a call of ``backward``: while somebody looks, another function stands in its
# place.
_looking: weakref.WeakSet[LoopLoss] = weakref.WeakSet()
_lock = threading.Lock()  # several threads may each train a model
_wrapper: Any = None


def _watch(loss: LoopLoss) -> None:
    global _wrapper
    with _lock:
        _looking.add(loss)
    if _wrapper is None or torch.autograd.backward is not _wrapper:
        torch.autograd.backward = _wrapper = _looked_at(torch.autograd.backward)


def _leave(loss: LoopLoss) -> None:
    global _wrapper
    with _lock:
        _looking.discard(loss)
    # Else somebody has put another there.
    if not _looking and _wrapper is not None and torch.autograd.backward is _wrapper:
        torch.autograd.backward, _wrapper = _wrapper.__wrapped__, None


def backward_times(loss: Tensor, factor: float) -> None:
    """``backward`` of a loss times a number; whoever looks at the loss sees it without."""
    _tell(loss, None)
    backward: Any = torch.autograd.backward
    if backward is _wrapper:
        backward = _wrapper.__wrapped__
    backward(loss, torch.full_like(loss, factor))


def _looked_at(backward: Callable[..., None]) -> Callable[..., None]:
    tell: Any = torch.compiler.disable(_tell)  # a step that is compiled must not compile this

    @functools.wraps(backward)
    def wrapper(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        tensors, grad_tensors = (
            list(each) if isinstance(each, Iterator) else each for each in (tensors, grad_tensors)
        )
        tell(tensors, grad_tensors)
        backward(tensors, grad_tensors, *args, **kwargs)

    return wrapper


def _tell(tensors: Any, grads: Any) -> None:
    """Tell whoever looks that ``backward`` is called."""
    roots = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
    given = list(grads) if isinstance(grads, (list, tuple)) else [grads] * len(roots)
    with _lock:
        looking = list(_looking)
    for each in looking:
        each.see(roots, given)
