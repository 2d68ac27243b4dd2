"""A script that asks for gloo by name; run by test_without_frameworks.py."""

from __future__ import annotations

import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo")
tensor = torch.tensor(1.0 + dist.get_rank())
dist.all_reduce(tensor, group=dist.new_group([0, 1], backend="GLOO"))
group = dist.new_group([0, 1], None, "gloo")
print(dist.get_backend(group), dist.get_backend(), float(tensor))
