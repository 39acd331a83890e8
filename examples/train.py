"""The README's loop: `paceline run --nproc-per-node 4 examples/train.py`, torchrun, or plain python."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline


def main() -> None:
    """Fit a plane; with more than one process, synchronously, and observed by Paceline."""
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(512, 8)
    dataset = TensorDataset(inputs, inputs @ torch.arange(8.0).unsqueeze(1))
    net = nn.Linear(8, 1)
    ddp = DistributedDataParallel(net) if distributed else net
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)

    pace = paceline.attach(ddp, optimizer, mode=os.environ.get("MODE", "observe"))
    loader = pace.data(dataset, batch_size=16)
    for _epoch in range(5):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(ddp(x), y)
            loss.backward()
            optimizer.step()
    pace.close()

    if not distributed or dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
