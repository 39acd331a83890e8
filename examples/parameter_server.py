"""Parameter servers: `paceline run --nproc-per-node 4 examples/parameter_server.py` makes three workers and a server.

The same script for all roles. Run with plain python, it trains alone.
"""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def main() -> None:
    """Fit a plane; with more than one process, the last one keeps the parameters and applies what the others send."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 8)
    dataset = TensorDataset(inputs, inputs @ torch.arange(8.0).unsqueeze(1))
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

    with paceline.parameter_server(net, optimizer, mode="auto", num_servers=1) as pace:
        loader = pace.data(dataset, batch_size=16)
        for _epoch in range(5):
            for x, y in loader:  # on the server: none; it serves until the workers have left
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(net(x), y)
                loss.backward()
                optimizer.step()  # on a worker: nothing; the server has done it

    if os.environ.get("RANK", "0") == "0":
        print(f"loss {nn.functional.mse_loss(net(inputs), dataset.tensors[1]).item():.4f}")


if __name__ == "__main__":
    main()
