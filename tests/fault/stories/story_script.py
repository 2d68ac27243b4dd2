"""The training that stories are about: a small network, and a diary of all that happens to it.

    paceline run -n 3 --min 1 story_script.py --steps 200 --diary DIRECTORY

Every process writes what it does into a file of its own, line by line, with the time of the clock
that all processes of a machine share; so the diaries of the killed can be read as well. After each
step it looks whether the story wants it to do something strange: a file `do-NUMBER` in the
directory says what; and a file `finish` says behind which step all shall end.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline as pl
from paceline.runtime.job import current


class Diary:
    """Lines of words; one that was written survives the death of its writer."""

    def __init__(self, directory: Path) -> None:
        path = directory / f"{os.getpid()}.diary"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, *words: object) -> None:
        os.write(self._fd, (" ".join(map(str, (time.monotonic(), *words))) + "\n").encode())


class Samples(Dataset):
    """Random inputs that know their number."""

    def __init__(self, count: int, width: int) -> None:
        self._x = torch.randn(count, width, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self._x[index]


def digest(model: nn.Module) -> str:
    data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def obey(order: str, model: nn.Module) -> None:
    """Do something that no training does."""
    what, _, amount = order.partition(" ")
    if what == "hold-the-gil":
        lock, holding = ctypes.create_string_buffer(64), ctypes.PyDLL(None)  # which keeps the GIL
        for _ in range(2):
            holding.pthread_mutex_lock(lock)  # the second time for ever
    elif what == "eat":
        hoard = bytearray(int(amount) << 20)
        hoard[::4096] = b"x" * len(hoard[::4096])
    elif what == "poison":  # the gradient of the next step
        first = next(model.parameters())
        handle = first.register_hook(lambda grad: (handle.remove(), grad * float("nan"))[1])
    elif what == "flip":
        next(model.parameters()).detach().view(torch.int32)[0, 0] ^= 1 << 12
    elif what == "sleep":
        time.sleep(float(amount))
    else:
        raise ValueError(f"a story cannot ask for {order!r}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--samples", type=int, default=960)
    parser.add_argument("--batch", type=int, default=8, help="of each worker")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--pause", type=float, default=0.02, help="a step's computing, in seconds")
    parser.add_argument("--pace", default="allreduce")
    parser.add_argument("--nonfinite", default="ignore")
    parser.add_argument("--check", type=int, default=0, help="consistency, every so many steps")
    parser.add_argument("--diary", type=Path, required=True)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pl.init()
    job, diary = current(), Diary(given.diary)
    diary.note("born", job.env.rank, job.env.number)
    layers = [nn.Linear(given.width, given.width), nn.Tanh(), nn.Linear(given.width, 1)]
    model = nn.Sequential(*layers)
    made = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer = pl.distribute(model, made, given.pace, nonfinite=given.nonfinite)
    loader = DataLoader(Samples(given.samples, given.width), given.batch, shuffle=True)
    order = given.diary / f"do-{job.env.number}"
    ending, last, epoch = given.diary / "finish", given.steps, 0
    while job.steps_done < last:
        for ids, x in pl.shard(loader, epoch=epoch, seed=0):
            loss = model(x).pow(2).mean()
            loss.backward()
            time.sleep(given.pause)
            optimizer.step()
            optimizer.zero_grad()
            used = ",".join(map(str, ids.tolist()))
            diary.note("step", job.steps_done, pl.world_size(), epoch, digest(model), used)
            pl.report(loss=loss.item())
            if given.check and job.steps_done % given.check == 0:
                pl.check_consistency(model)
            if order.exists():
                told = order.read_text()
                order.unlink()
                obey(told, model)
            if ending.exists():  # the story is over behind that step, which is still to come
                last = min(given.steps, int(ending.read_text()))
            if job.steps_done >= last:
                break
        epoch += 1
    diary.note("end", job.steps_done, digest(model))


if __name__ == "__main__":
    main()
