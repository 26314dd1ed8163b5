"""Table 2 of the paper: CIFAR-10, five methods, amplified and not, trained by this project."""

from __future__ import annotations

from typing import Any

import corrnoise as cn
from corrnoise._progress import Progress

from . import accuracy, noise_table, record
from .accuracy import Setting, Task
from .jobs import cuda

TITLE = "Accuracy on CIFAR-10"
FULL = {"num_examples": 50_000, "batch_size": 512, "epochs": noise_table.EPOCHS}
# What a machine without a GPU does instead, and what a test does.
REDUCED = {"num_examples": 2_000, "batch_size": 100, "epochs": 1}
SMOKE = {"num_examples": 180, "batch_size": 9, "epochs": 1}
# As the paper prints them, for m ← βm + (1-β)x̂.
RATES = {
    "balls-in-bins": {
        "dp_sgd": 0.1, "bsr": 0.3, "bisr": 0.7, "band_mf": 0.3, "band_inv_mf": 0.4,
    },
    "fixed": {"dp_sgd": 0.1, "bsr": 0.2, "bisr": 0.7, "band_mf": 0.2, "band_inv_mf": 0.5},
}  # fmt: skip
CLIP_NORM = 10.0
RESUMES = True
TASK = Task(
    name="cifar10",
    dataset="CIFAR-10",
    printed={
        "balls-in-bins": (44.6, 49.8, 61.8, 50.0, 57.4),
        "fixed": (39.0, 45.2, 56.2, 45.8, 57.9),
    },
)

draw = accuracy.draw


def run(
    *, smoke: bool, progress: Progress | None, earlier: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train every method with three seeds; on a CPU, a small part of it."""
    gpu = cuda() and not smoke
    size = FULL if gpu else SMOKE if smoke else REDUCED
    before = record.resumed(earlier, size)

    def setting(method: str, sampling: str, plan: cn.Plan) -> Setting:
        """The paper's, whose rate is multiplied by 1 - β for its Algorithm 1.

        It has none for Poisson batches: DP-SGD keeps the amplified one, relative to its noise.
        """
        own, times = sampling, 1.0 - noise_table.DATASETS[TASK.dataset]["momentum"]
        if sampling not in RATES:
            own = noise_table.SAMPLINGS[0] if gpu else "fixed"
            times *= TASK.plan(method, own, size).error / plan.error
        return Setting(RATES[own][method] * times, CLIP_NORM)

    rows = TASK.run(
        size, gpu=gpu, setting=setting, progress=progress, finished=before.get("rows", ())
    )
    return {
        "reduced": not gpu,
        **size,
        "device": accuracy.device_name(),
        "kept_from": before.get("kept_from"),
        "rows": rows,
    }


def report(result: dict[str, Any]) -> str:
    """The table beside the printed one."""
    data = result["data"]
    rows = data["rows"]
    if data["reduced"]:
        head = (
            f"**Reduced**: no GPU was available, so {data['num_examples']} images and "
            f"{data['epochs']} epoch; it only shows that everything runs."
        )
    else:
        head = (
            f"({noise_table.EPSILON:g}, {noise_table.DELTA:g})-DP, {data['num_examples']:,} "
            f"training images, batch {data['batch_size']}, {data['epochs']} epochs, no "
            f"augmentation, constant learning rate, {len(rows[0]['accuracy'])} seeds, the official "
            f"test set after the last epoch; trained on one {data['device']} through "
            "`corrnoise.torch.PrivacyEngine`."
        )
    parts = [head, accuracy.table(rows, "printed, %")]
    if not data["reduced"]:
        parts += [accuracy.claims(rows), *accuracy.kept_note(data)]
    if any(row["sampling"] == "poisson" for row in rows):
        parts.append(
            "The paper has no row for Poisson batches; their rate is the amplified one of DP-SGD, "
            "relative to the noise."
        )
    return "\n\n".join(parts)
