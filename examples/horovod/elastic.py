"""Elastic training with commits: Horovod's elastic script with the import changed.

paceline run -n 3 --min 2 --max 3 examples/horovod/elastic.py
"""

import argparse
import os
import signal

import paceline.horovod.torch as hvd  # was: import horovod.torch as hvd
import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batches", type=int, default=40)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batches-per-commit", type=int, default=5)
parser.add_argument("--kill-rank-at", type=int, default=-1, help="rank 1 ends at this batch")
args = parser.parse_args()

hvd.init()
torch.manual_seed(1)
torch.set_num_threads(1)
weight = torch.randn(20, 5)
samples = torch.randn(args.batches * 64, 20)
dataset = torch.utils.data.TensorDataset(samples, (samples @ weight).argmax(1))
sampler = hvd.elastic.ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=16, sampler=sampler)
model = torch.nn.Linear(20, 5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    while state.epoch < args.epochs:
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            state.sampler.record_batch(state.batch, len(data))
            state.batch += 1
            state.loss = loss.item()
            is_due = state.epoch == 0 and state.batch == args.kill_rank_at
            if is_due and hvd.rank() == 1 and hvd.size() == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            if state.batch % args.batches_per_commit == 0:
                state.commit()
        mean = hvd.allreduce(torch.tensor(state.loss), name="loss").item()
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}: {hvd.size()} workers, loss {mean:.3f}", flush=True)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.batch = 0
        state.commit()


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * hvd.size()
    if hvd.rank() == 0:
        print(f"continues with {hvd.size()} workers", flush=True)


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0, loss=0.0)
state.register_reset_callbacks([on_state_reset])
train(state)
