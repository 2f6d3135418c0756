"""Training with torch alone: the oracle of `unisono train`."""

import math

import torch
import torch.nn.functional as F

from unisono.training import models
from unisono.training.data import Dataset
from unisono.training.options import Options
from unisono.training.schedule import epoch_batches


def train_plainly(options: Options, dataset: Dataset, device: str | torch.device = "cpu") -> tuple[list[float], float]:
    """Train in float32, warming up for an epoch, without unisono's loop, wrapper or rates.

    Returns:
        The loss of each step, and the accuracy on the test pictures.
    """
    torch.manual_seed(options.seed)
    shape, num_rows = dataset.image_shape, len(dataset.train_labels)
    model = models.build(options.model, num_classes=dataset.num_classes, image_shape=shape).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4)
    losses: list[float] = []
    for epoch in range(options.epochs):
        batches = epoch_batches(num_rows, options.batch_size, seed=options.seed, epoch=epoch)
        for rows in batches:
            step, warm_up, steps = len(losses), len(batches), len(batches) * options.epochs
            falling = 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / (steps - warm_up))
            optimizer.param_groups[0]["lr"] = options.lr * ((step + 1) / warm_up if step < warm_up else falling)
            optimizer.zero_grad()
            here = rows.to(device)
            loss = F.cross_entropy(model(dataset.train_images[here]), dataset.train_labels[here])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    with torch.no_grad():
        correct = model(dataset.test_images).argmax(1) == dataset.test_labels
    return losses, correct.double().mean().item()
