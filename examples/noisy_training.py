"""Plain training, no clients and no radio: impulses hit the gradients, which are left so or repaired in two ways.

Each gradient entry gets alpha-stable noise, whose variance is infinite. Scaling the norm down keeps an impulse's
direction and shrinks all else; median anchored clipping cuts the impulse alone. Each has a range of thresholds, all of
them shown: the best one is seen on test data, and would be chosen on other data.

    python examples/noisy_training.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import stableair as sa
from stableair.nn import clip_grad_mac_

ALPHA, TAU = 1.5, 0.1  # how heavy the tails are, and the scale of the noise
EPOCHS, BATCH, LR, SEEDS = 5, 40, 0.1, 3
torch.set_num_threads(1)  # the model is too small to be shared out

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
held = torch.arange(len(y)) % 5 == 0  # every fifth image is kept for the test
train_x, train_y, test_x, test_y = x[~held], y[~held], x[held], y[held]


def train(repair, tau, seed):
    """The test accuracy after a training in which `repair(parameters)` comes between the noise and the step."""
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
