"""A private training loop without Opacus: torch.func for the gradients, corrnoise for the noise."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.func import functional_call, grad, vmap

import corrnoise as cn

CLIP, RATE = 1.0, 0.5


def main(epochs: int = 20) -> float:
    """Train, and return the accuracy on the last 360 images."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    plan = cn.plan(num_examples=1437, batch_size=64, epochs=epochs, epsilon=3, delta=1e-4,
                   momentum=0.9, mechanisms=["bisr"])  # fmt: skip
    key = cn.noise.Key.generate()
    noise = cn.noise.CorrelatedNoise(plan.mechanism, key)
    batches = plan.batches(key)

    def loss(weights, image, label):
        return nn.functional.cross_entropy(functional_call(model, weights, image), label)

    weights = {name: value.detach() for name, value in model.named_parameters()}
    speed = {name: torch.zeros_like(value) for name, value in weights.items()}
    for step in range(plan.num_steps):
        here = torch.from_numpy(batches.indices(step))
        each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x[here], y[here])
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        shrink = (CLIP / norms.clamp(min=1e-12)).clamp(max=1.0)
        sums = [torch.einsum("i,i...->...", shrink, g).contiguous() for g in each.values()]
        noise.add_(sums, step, scale=plan.noise_multiplier * CLIP)
        for name, total in zip(weights, sums, strict=True):
            speed[name] = 0.9 * speed[name] + total / plan.divisor
            weights[name] = weights[name] - RATE * speed[name]
    found = functional_call(model, weights, x[-360:]).argmax(dim=1)
    return (found == y[-360:]).float().mean().item()


if __name__ == "__main__":
    print(f"accuracy {main():.3f}")
