"""Handwritten digits in JAX: a plan, balls-in-bins batches, checkpoints by orbax, a statement."""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

import corrnoise as cn
from corrnoise.jax import PrivateRun, clipped_sums

CLIP, RATE, MOMENTUM = 1.0, 0.08, 0.9
TRAIN = 1437
SETTINGS = {"learning rate": RATE, "momentum": MOMENTUM}


def model(params, image):
    """A network of two layers; the leaves are in the order of ``torch.nn.Sequential``'s."""
    (w1, b1), (w2, b2) = params
    return w2 @ jax.nn.relu(w1 @ image + b1) + b2


def loss(params, image, label):
    """Of one example."""
    return optax.softmax_cross_entropy_with_integer_labels(model(params, image), label)


def start(seed=0):
    """The first weights, as torch.nn.Linear draws them: uniform up to 1/√(inputs)."""
    generator = np.random.default_rng(seed)

    def layer(inputs, outputs):
        shapes = (outputs, inputs), (outputs,)
        return tuple(
            jnp.asarray(generator.uniform(-1, 1, s) / inputs**0.5, jnp.float32) for s in shapes
        )

    return [layer(64, 128), layer(128, 10)]


@jax.jit
def sums_of(params, images, labels, mask):
    """The sum of the clipped gradients of a batch."""
    return clipped_sums(loss, params, images, labels, clip_norm=CLIP, mask=mask)


@jax.jit
def accuracy(params, images, labels):
    """Of the most likely classes."""
    found = jax.vmap(model, in_axes=(None, 0))(params, images).argmax(axis=1)
    return (found == labels).mean()


def padded(x, y, indices, size):
    """A batch filled up with its own first rows, so that all batches have one of few shapes."""
    filled = -(-max(len(indices), 1) // size) * size
    rows = np.zeros(filled, np.int64)
    rows[: len(indices)] = indices
    return x[rows], y[rows], jnp.arange(filled) < len(indices)


def main(epochs=20, folder=None, stop=None, params=None, plan=None, key=None):
    """Train, and return the accuracy on the last 360 images.

    Args:
        epochs: of the plan.
        folder: for key, ledger, checkpoints, statement and report; resumes what is there.
        stop: the step to stop at, as a crash would.
        params: the first weights.
        plan: another one than for ε = 3.
        key: of the run, where there is no folder.
    """
    images, labels = load_digits(return_X_y=True)
    x, y = jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)
    plan = plan or cn.plan(
        num_examples=TRAIN, batch_size=64, epochs=epochs, epsilon=3, delta=1e-4,
        momentum=MOMENTUM, mechanisms=["bisr"], sampling="balls-in-bins",
    )  # fmt: skip
    params = start() if params is None else params
    place = None if folder is None else Path(folder).absolute()
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
    run = PrivateRun(
        plan, params, clip_norm=CLIP, data=(x[:TRAIN], y[:TRAIN]),
        key=key if place is None else place / "key",
        ledger=None if place is None else place / "ledger",
        settings=SETTINGS,
    )  # fmt: skip
    optimizer = optax.sgd(RATE, momentum=MOMENTUM)
    state = {"params": params, "noise": run.init(params), "optimizer": optimizer.init(params)}
    saver = None if place is None else ocp.CheckpointManager(place / "checkpoints")
    if saver is not None and saver.latest_step() is not None:
        state = saver.restore(saver.latest_step(), args=ocp.args.StandardRestore(state))

    @jax.jit
    def apply(params, gradient, state):
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state

    records, begun = [], time.perf_counter()
    for step in range(int(state["noise"].step), plan.num_steps if stop is None else stop):
        batch = padded(x, y, run.batches.indices(step), 32)
        sums = sums_of(state["params"], *batch)
        gradient, noise = run.release(sums, state["noise"])
        params, momenta = apply(state["params"], gradient, state["optimizer"])
        state = {"params": params, "noise": noise, "optimizer": momenta}
        if (step + 1) % plan.participation.min_sep == 0:
            found = float(accuracy(params, x[TRAIN:], y[TRAIN:]))
            records.append(cn.records.Record(step + 1, None, float("nan"), None, found))
            if saver is not None:
                saver.save(step + 1, args=ocp.args.StandardSave(state))
    if saver is not None:
        saver.close()
    found = float(accuracy(state["params"], x[TRAIN:], y[TRAIN:]))
    if place is not None and int(state["noise"].step) == plan.num_steps:
        write(place, run, plan, records, time.perf_counter() - begun)
    run.close()
    main.params = state["params"]
    return found


def write(place, run, plan, records, seconds):
    """The statement, the record of the run and the report."""
    from corrnoise import report

    statement = run.statement()
    record = cn.records.Run(
        label=plan.mechanism.name, plan=plan, statement=statement, records=tuple(records),
        data={"name": "digits", "num_train": TRAIN, "num_test": 360, "num_classes": 10},
        model={"name": "two layers", "num_parameters": run.num_parameters},
        settings={**SETTINGS, "clip_norm": CLIP, "device": jax.default_backend()},
        seconds=seconds,
    )  # fmt: skip
    (place / "statement.txt").write_text(statement.to_text())
    (place / "run.json").write_text(record.to_json())
    report.write(place / "report.html", plan, [record])


if __name__ == "__main__":
    print(f"accuracy {main(folder=sys.argv[1] if len(sys.argv) > 1 else None):.3f}")
