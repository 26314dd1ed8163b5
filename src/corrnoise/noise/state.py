"""The noise in a checkpoint: the run that it belongs to, and the state of a recursion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from corrnoise import _checks as checks
from corrnoise._formats import FORMATS
from corrnoise.noise import sealing
from corrnoise.noise.backends.cpu import Layout
from corrnoise.noise.filtering.filters import Filter
from corrnoise.noise.filtering.scheme import Scheme
from corrnoise.noise.generator.key import Key
from corrnoise.noise.generator.normals import Normals
from corrnoise.noise.generator.stream import NoiseStream


@dataclass(frozen=True, eq=False)
class Restored:
    """The state of a recursion: the next step, and the saved vectors with their layout, if any."""

    step: int
    layout: Layout
    vectors: Normals | None


def identity(stream: NoiseStream, spec: Filter) -> dict[str, Any]:
    """The values that must agree for two runs to have the same noise; never the key itself."""
    return {
        "format": FORMATS["noise state"],
        "key_fingerprint": stream.key.fingerprint,
        "stream": stream.stream,
        "rounds": stream.rounds,
        "num_steps": spec.num_steps,
        "mechanism_digest": spec.mechanism.fingerprint,
    }


def check_identity(data: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise unless the saved identity is the expected one, so that the state is of this noise."""
    for name, value in expected.items():
        if data.get(name) != value:
            raise ValueError(
                f"state must have {name}={value!r} like this noise, got {data.get(name)!r}; "
                "load the checkpoint of this run, or build the noise as that run did"
            )


def restore(data: Mapping[str, Any], scheme: Scheme, num_steps: int, key: Key) -> Restored:
    """Validate the state of a recursion and decrypt it."""
    step = checks.integer("next_step", data["next_step"], 0, num_steps)
    layout = tuple((int(offset), int(size)) for offset, size in data["layout"])
    sealed = data["state"]
    if sealed is None:
        return Restored(step, layout, None)
    shape = (scheme.num_vectors, sum(size for _, size in layout))
    header = {name: value for name, value in data.items() if name != "state"}
    vectors = sealing.unseal(np.asarray(sealed), key.subkey("state"), header, shape)
    return Restored(step, layout, vectors)
