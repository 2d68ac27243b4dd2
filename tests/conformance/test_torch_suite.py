"""PyTorch's own distributed tests on our backend (see torch_suite.py).

By default a choice that touches every kind of operation; `-m conformance` runs all of them, which
takes ten minutes. What passes and why the rest is skipped stands in docs/torch-backend.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parent / "torch_suite.py"
CHOICE = [
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_all_gather",
    "test_all_gather_coalesced_simple",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_full_group_max",
    "test_all_reduce_sum_async",
    "test_all_to_all",
    "test_all_to_all_single_unequal_split",
    "test_barrier",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_ddp_logging_data_cpu",
    "test_destroy_group",
    "test_gather",
    "test_gather_object",
    "test_get_future",
    "test_grads_same_across_ranks_with_no_sync",
    "test_irecv",
    "test_isend_torch_profiler",
    "test_monitored_barrier_gloo",
    "test_new_subgroups_with_group_param",
    "test_reduce_sum_twice",
    "test_scatter",
    "test_scatter_object_list",
    "test_send_recv_any_source_autograd_profiler",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]


def outcomes(tmp_path: Path, timeout_s: float, *arguments: str) -> dict[str, dict[str, str]]:
    report = tmp_path / "outcomes.json"
    command = [sys.executable, str(SUITE), "--json", str(report), *arguments]
    foreign = ("PACELINE_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_", "RANK", "WORLD_SIZE")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=environ, check=False
    )
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, dict[str, str]] = json.loads(report.read_text())
    failed = [f"{name}: {o['why']}" for name, o in found.items() if o["outcome"] == "failed"]
    assert not failed, "\n".join(failed) + done.stderr[-4000:]
    return found


@pytest.mark.timeout(420)
def test_chosen_tests_of_torch(tmp_path):
    found = outcomes(tmp_path, 400, "--stand-in", "gloo", "mpi", "--only", *CHOICE)
    passed = {name for name, outcome in found.items() if outcome["outcome"] == "passed"}
    assert passed == set(CHOICE), set(CHOICE) - passed


@pytest.mark.slow
@pytest.mark.conformance
@pytest.mark.timeout(1800)
def test_all_tests_of_torch(tmp_path):
    found = outcomes(tmp_path, 900)
    assert sum(o["outcome"] == "passed" for o in found.values()) >= 94  # gloo's number
    large = [name for name, o in found.items() if o["why"].startswith("Skipped due to small")]
    found = outcomes(tmp_path, 600, "--world-size", "8", "--only", *large)
    assert sum(o["outcome"] == "passed" for o in found.values()) >= 21
    outcomes(tmp_path, 300, "--stand-in", "gloo", "mpi", "-k", "all_to_all")
