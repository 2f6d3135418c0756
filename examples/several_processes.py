"""The same training with any number of processes: one, or several under torchrun, on one machine or several.

    python examples/several_processes.py
    torchrun --nproc-per-node 2 examples/several_processes.py

Each process takes its part of every batch. The last batch of an epoch has fewer rows, and may leave a process without
any; that changes nothing. The losses are the same for any number of processes, within the rounding of float32.
"""

import os

import torch
from torch import nn

import unisono

INPUT_SIZE, NUM_ROWS, BATCH_ROWS, EPOCHS = 5, 100, 30, 5
LEARNING_RATE, SEED = 0.5, 0


def main() -> None:
    rank, num_processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    data = torch.Generator().manual_seed(SEED)
    rows = torch.randn(NUM_ROWS, INPUT_SIZE, generator=data)
    targets = (rows.sum(1, keepdim=True) > 0).float()

    torch.manual_seed(rank)  # processes may begin with different weights: all get those of rank 0
    model = unisono.DataParallel(nn.Sequential(nn.Linear(INPUT_SIZE, 8), nn.Tanh(), nn.Linear(8, 1)), ["cpu"])
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    criterion = nn.BCEWithLogitsLoss()

    for epoch in range(1, EPOCHS + 1):
        for batch in torch.randperm(NUM_ROWS, generator=data).split(BATCH_ROWS):  # the same in all processes
            mine = batch.tensor_split(num_processes)[rank]
            loss = criterion(model(rows[mine]), targets[mine])  # a mean over this process's rows
            optimizer.zero_grad()
            loss.backward()  # gradients of the mean over all rows
            optimizer.step()
        if rank == 0:
            with torch.no_grad():  # without gradients a forward stays in its process
                print(f"epoch {epoch}: loss {criterion(model(rows), targets):.6f}")
    if rank == 0:
        print(f"processes: {num_processes}")


if __name__ == "__main__":
    main()
