"""Time of the digest of a gradient, which every private step takes.

``python benchmarks/digest.py`` measures in one run: the keyed hash of the elements in their
places, a copy of the gradient (one read and one write), and its norm (one read).
"""

from __future__ import annotations

import statistics
import time

import torch

from corrnoise._tables import text
from corrnoise.torch.fingerprint import PositionHash


def median_ms(function, device: str, repeats: int = 20) -> float:
    times = []
    for _ in range(repeats + 3):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    digest = PositionHash(bytes(range(32)))
    rows = []
    for size in (10**6, 10**7, 10**8) if device == "cuda" else (10**5, 10**6, 10**7):
        for kind in (torch.float32, torch.bfloat16):
            grad = torch.randn(size, device=device).to(kind)
            spare = torch.empty_like(grad)
            hashing = median_ms(lambda: digest([grad]), device)  # noqa: B023
            copying = median_ms(lambda: spare.copy_(grad), device)  # noqa: B023
            norm = median_ms(lambda: torch.linalg.vector_norm(grad), device)  # noqa: B023
            rows.append(
                [
                    f"{size:,}",
                    str(kind).removeprefix("torch."),
                    f"{hashing:.3f}",
                    f"{copying:.3f}",
                    f"{norm:.3f}",
                    f"{hashing / copying:.2f}",
                ]
            )
    print(name)
    print(text(["elements", "dtype", "hash ms", "copy ms", "norm ms", "hash/copy"], rows))


if __name__ == "__main__":
    main()
