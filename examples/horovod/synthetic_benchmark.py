"""Samples per second on random data: Horovod's benchmark script with the import changed.

paceline run -n 2 examples/horovod/synthetic_benchmark.py
"""

import argparse
import timeit

import numpy as np
import paceline.horovod.torch as hvd  # was: import horovod.torch as hvd
import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=3)
parser.add_argument("--num-iters", type=int, default=3)
parser.add_argument("--fp16-allreduce", action="store_true")
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
layers = [torch.nn.Linear(args.width, args.width), torch.nn.ReLU()]
layers += [torch.nn.Linear(args.width, args.width), torch.nn.ReLU()]
model = torch.nn.Sequential(*layers, torch.nn.Linear(args.width, 1000))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
data = torch.randn(args.batch_size, args.width)
target = torch.randint(1000, (args.batch_size,))


def benchmark_step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()


def log(text):
    if hvd.rank() == 0:
        print(text, flush=True)


timeit.timeit(benchmark_step, number=args.num_warmup_batches)
rates = []
for _ in range(args.num_iters):
    seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    rates.append(args.batch_size * args.num_batches_per_iter / seconds)
log(f"samples/s per process: {np.mean(rates):.1f} +- {1.96 * np.std(rates):.1f}")
log(f"total on {hvd.size()} processes: {hvd.size() * np.mean(rates):.1f}")
