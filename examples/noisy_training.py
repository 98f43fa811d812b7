"""Train a model in plain PyTorch, with impulsive noise on the gradients, and compare two ways to repair them.

Each gradient entry gets alpha-stable noise, which has infinite variance. Norm clipping keeps the direction of an
impulse and shrinks all other entries; median anchored clipping reduces only the impulse. Both run with several
thresholds. The table shows the test accuracy of each threshold; select a threshold on validation data.

    python examples/noisy_training.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import stableair as sa
from stableair.nn import clip_grad_mac_

ALPHA, TAU = 1.5, 0.1  # tail index and scale of the noise
EPOCHS, BATCH, LR, SEEDS = 5, 40, 0.1, 3
torch.set_num_threads(1)  # the model is too small to use more threads

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
held = torch.arange(len(y)) % 5 == 0  # every fifth image is a test image
train_x, train_y, test_x, test_y = x[~held], y[~held], x[held], y[held]


def train(repair, tau, seed):
    """Train a model, with `repair(parameters)` after the noise and before the step; return the test accuracy."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    source = torch.Generator().manual_seed(seed)  # the same batches and the same noise for every repair
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(train_y), generator=source).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train_x[batch]), train_y[batch]).backward()
            for p in model.parameters():
                p.grad += sa.stable.sample(tuple(p.shape), ALPHA, tau, source)
            repair(model.parameters())
            optimizer.step()
    return (model(test_x).argmax(1) == test_y).float().mean().item()


def main():
    rows = [("no noise", 0.0, lambda ps: None), ("noise, no repair", TAU, lambda ps: None)]
    for bound in (10, 30, 100):
        rows.append((f"clip_grad_norm_({bound})", TAU, lambda ps, c=bound: nn.utils.clip_grad_norm_(ps, c)))
    for C in (0.1, 0.3, 1):
        rows.append((f"clip_grad_mac_(C={C})", TAU, lambda ps, c=C: clip_grad_mac_(ps, c)))
    print(f"{'gradients':<24}test accuracy, mean of {SEEDS} seeds, and each")
    for name, tau, repair in rows:
        found = [train(repair, tau, seed) for seed in range(SEEDS)]
        print(f"{name:<24}{sum(found) / SEEDS:.3f}   " + " ".join(f"{a:.3f}" for a in found), flush=True)


if __name__ == "__main__":
    main()
