"""Keyed digests that tell one dataset or model from another, and tell nothing without the key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from corrnoise.noise.generator.key import Key

_PROBES = 64


def data_digest(dataset: Any, key: Key) -> str:
    """A digest of the size of a dataset and of 64 of its examples, spread over it.

    Examples that differ each time they are read (random augmentation) are left out; then the size
    alone tells datasets apart.
    """
    size = len(dataset)
    probes = sorted({k * size // _PROBES for k in range(_PROBES)})
    text = hashlib.sha256(repr(size).encode())
    for index in probes:
        first = hashlib.sha256(b"".join(_bytes(dataset[index]))).digest()
        again = hashlib.sha256(b"".join(_bytes(dataset[index]))).digest()
        text.update(first if first == again else b"random")
    return _keyed(key, b"data", text.digest())


def parameter_digest(params: Sequence[nn.Parameter], key: Key) -> str:
    """A digest of the shapes and kinds of an optimizer's parameters, in order."""
    shapes = [(tuple(param.shape), str(param.dtype)) for param in params]
    return _keyed(key, b"parameters", repr(shapes).encode())


def _keyed(key: Key, what: bytes, text: bytes) -> str:
    return hmac.new(key.reveal(), what + text, hashlib.sha256).hexdigest()[:16]


def _bytes(value: Any) -> Iterable[bytes]:
    if isinstance(value, torch.Tensor):
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for name in sorted(value, key=repr):
            yield repr(name).encode()
            yield from _bytes(value[name])
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _bytes(part)
    elif isinstance(value, (int, float, str, bytes, bool)):
        yield repr(value).encode()
    else:
        yield type(value).__name__.encode()
