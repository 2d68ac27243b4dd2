"""Logistic regression on the digits of scikit-learn; resumes from its checkpoint.

    paceline run -n 2 -s 1 --pace ssp:3 examples/cluster/train.py --saved /tmp/digits

The same script runs on one machine, over ssh, on Slurm, on Ray and in the pods of jobset.yaml.
"""

from __future__ import annotations

import argparse

import paceline as pl
import torch
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--saved", default="saved", help="directory of checkpoints")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

pl.init()
torch.manual_seed(0)
digits = load_digits()
data = torch.utils.data.TensorDataset(
    torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
)
model = torch.nn.Linear(64, 10)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5))
loader = pl.shard(torch.utils.data.DataLoader(data, batch_size=32, shuffle=True))
checkpoint = pl.Checkpoint(options.saved, every=50)

loss = torch.tensor(float("nan"))
while checkpoint.steps < options.steps:
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.step()
        if checkpoint.steps >= options.steps:
            break
if pl.rank() == 0:
    print(f"step {checkpoint.steps}: loss {loss.item():.3f}")
