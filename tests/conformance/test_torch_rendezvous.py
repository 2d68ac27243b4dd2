"""The ways into a process group: our launcher, explicit stores, files, torchrun; and out again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import paceline as pl
from support import run_processes
from support.environs import job_environs

SCRIPT = """
import torch, torch.distributed as dist, paceline
dist.init_process_group("paceline")
tensor = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(tensor)
store = dist.distributed_c10d._get_default_store()
while hasattr(store, "underlying_store"):
    store = store.underlying_store
print("sum", tensor.item(), "over", type(store).__name__)
dist.destroy_process_group()
"""


def values(outcomes):
    assert all(o.status == 0 and o.error is None for o in outcomes), "\n".join(map(str, outcomes))
    return [o.value for o in outcomes]


def plain_environ() -> dict[str, str]:
    """An environment in which no launcher says anything."""
    foreign = ("PACELINE_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_", "RANK", "WORLD_SIZE")
    return {k: v for k, v in os.environ.items() if not k.startswith(foreign)}


def listening_addresses() -> list[str]:
    """Return the addresses on which this process listens for TCP."""
    mine = set()
    for fd in Path("/proc/self/fd").iterdir():
        with_name = os.path.realpath(fd)
        mine.add(with_name.rpartition("[")[2].rstrip("]"))
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    rows += [line.split() for line in Path("/proc/self/net/tcp6").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in mine]


def held_here() -> tuple[int, int, int]:
    tasks, fds = os.listdir("/proc/self/task"), os.listdir("/proc/self/fd")
    return len(tasks), len(fds), threading.active_count()


def has_more(first: tuple[int, ...], last: tuple[int, ...]) -> bool:
    return any(after >= before + 3 for before, after in zip(first, last, strict=True))


def test_under_our_launcher_nothing_listens_to_strangers():
    def body(number):
        import paceline.runtime.torch_plugin

        paceline.runtime.torch_plugin.register()
        sums = []
        for _ in range(2):
            dist.init_process_group("paceline")
            tensor = torch.tensor([number + 1.0])
            dist.all_reduce(tensor)
            sums.append(tensor.item())
            dist.distributed_c10d._get_default_store().set(f"from {number}", "hello")
            other = dist.distributed_c10d._get_default_store().get(f"from {1 - number}")
            dist.destroy_process_group()
        return sums, other, listening_addresses(), pl.world_size()

    with job_environs(2) as environs:
        for sums, other, listening, world_size in values(run_processes(body, environs)):
            assert sums == [3, 3] and other == b"hello" and world_size == 2
            assert listening == []  # one host: the links are Unix sockets


def test_gloo_meets_over_our_control_plane():
    def body(number):
        import paceline.runtime.torch_plugin

        paceline.runtime.torch_plugin.register()
        dist.init_process_group("gloo")
        tensor = torch.tensor([number + 1.0])
        dist.all_reduce(tensor)
        pair = dist.new_group([0, 1], backend="paceline")
        dist.all_reduce(tensor, group=pair)
        dist.destroy_process_group()
        return tensor.item()

    with job_environs(2) as environs:
        assert values(run_processes(body, environs)) == [6, 6]


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_explicit_stores_again_and_again(kind, tmp_path):
    path = tmp_path / "port"  # chosen by the store: one that was free before may be taken

    def body(number):
        import paceline.runtime.torch_plugin

        paceline.runtime.torch_plugin.register()
        if kind == "tcp":
            if number == 0:
                store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
                path.with_suffix(".new").write_text(str(store.port))
                path.with_suffix(".new").rename(path)
            else:
                while not path.exists():
                    time.sleep(0.01)
                store = dist.TCPStore("127.0.0.1", int(path.read_text()), 2)
        else:
            store = dist.FileStore(str(tmp_path / "store"), 2)
        counts = []
        for _ in range(6):
            dist.init_process_group("paceline", store=store, rank=number, world_size=2)
            tensor = torch.tensor([number + 1.0])
            dist.all_reduce(tensor)
            assert tensor.item() == 3
            group = dist.new_group([0, 1])
            dist.all_reduce(tensor, group=group)
            dist.barrier()
            dist.destroy_process_group()
            counts.append(held_here())
        deadline_s = time.monotonic() + 30  # threads of the last one may just be ending
        while has_more(counts[0], counts[-1]) and time.monotonic() < deadline_s:
            time.sleep(0.05)
            counts.append(held_here())
        return counts

    for counts in values(run_processes(body, [plain_environ()] * 2)):
        assert not has_more(counts[0], counts[-1]), "a destroyed group leaves nothing behind"


def test_alone_and_with_a_wrong_rank():
    def body(_):
        import paceline.runtime.torch_plugin

        paceline.runtime.torch_plugin.register()
        dist.init_process_group("paceline", store=dist.HashStore(), rank=0, world_size=1)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        dist.all_gather_object([None], "x")
        dist.destroy_process_group()
        pl.init()
        with pytest.raises(pl.errors.UsageError, match="rank 0 of 1"):
            dist.init_process_group("paceline", store=dist.HashStore(), rank=1, world_size=2)
        return tensor.tolist()

    assert values(run_processes(body, [plain_environ()])) == [[1, 1]]


def test_paceline_run(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", "--log-dir", "none"]
    command.append(str(tmp_path / "script.py"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=plain_environ())
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("sum 3.0") == 2
    assert "over ControlStore" in done.stdout


def test_exit_without_destroying_the_group(tmp_path):
    """As most scripts do: also with a future that nobody waited for."""
    script = SCRIPT.replace("dist.destroy_process_group()", "keep = dist.new_group([0, 1])")
    script += "future = dist.all_reduce(tensor, async_op=True).get_future()\n"
    script += "if dist.get_rank() == 0: late = dist.irecv(tensor, 1).get_future()\n"
    (tmp_path / "script.py").write_text(script)
    store = f"file://{tmp_path}/store"
    text = (tmp_path / "script.py").read_text()

    def body(number):
        import paceline.runtime.torch_plugin

        paceline.runtime.torch_plugin.register()
        init = f'"paceline", init_method="{store}", rank={number}, world_size=2'
        exec(text.replace('"paceline")', f"{init})"), {})

    values(run_processes(body, [plain_environ()] * 2))


def test_rank_on_another_host_is_told_at_once_what_to_export(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    store.set("paceline/host", "another-machine 127.0.0.1")
    from paceline.errors import ConfigError
    from paceline.runtime.job import join_through

    with pytest.raises(ConfigError, match="export PACELINE_BIND"):
        join_through(store, 1, 2, 5.0)


@pytest.mark.slow
def test_torchrun(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command.append(str(tmp_path / "script.py"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=plain_environ())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("3.0") == 2  # both write to one pipe, word by word


def test_registering_is_quick_and_imports_nothing():
    code = (
        "import sys, torch, paceline.runtime.torch_plugin as p; before = set(sys.modules);"
        "p.register();"
        "p.register(); new = {m for m in set(sys.modules) - before if m.startswith('paceline')};"
        "assert not new, new; assert 'paceline' in torch.distributed.Backend.backend_list;"
        "h = sys.modules['torch.distributed.rendezvous']._rendezvous_handlers['env'];"
        "assert h.__module__ == 'paceline.runtime.torch_plugin', h"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=plain_environ())
