"""Private training of a classifier of handwritten digits."""

import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, EPSILON, DELTA, CLIP = 20, 3.0, 1e-4, 1.0


def main(epochs: int = EPOCHS) -> float:
    """Train, and return the accuracy on the last 360 images."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    data_loader = DataLoader(TensorDataset(x[:-360], y[:-360]), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    privacy_engine = PrivacyEngine()
    model, optimizer, data_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=data_loader,
        epochs=epochs,
        target_epsilon=EPSILON,
        target_delta=DELTA,
        max_grad_norm=CLIP,
    )

    for _ in range(epochs):
        for inputs, target in data_loader:
            optimizer.zero_grad()
            criterion(model(inputs), target).backward()
            optimizer.step()

    print(f"epsilon {privacy_engine.get_epsilon(DELTA):.2f}")
    with torch.no_grad():
        accuracy = (model(x[-360:]).argmax(dim=1) == y[-360:]).float().mean().item()
    print(f"accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
