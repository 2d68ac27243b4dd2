"""pl.Checkpoint where something is wrong: the disk, the directory, the model, the arguments."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.comm.group import Group
from paceline.state.files import load as reading
from support import run_ranks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root: it mounts a file system of 1 MB")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


class Trained:
    """A model of some width, with a checkpoint."""

    def __init__(self, directory: Any, width: int = 8, **options: Any) -> None:
        torch.manual_seed(2)
        self.model: Any = torch.nn.Linear(width, width)
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = pl.distribute(self.model, sgd)
        self.width = width
        self.checkpoint = pl.Checkpoint(directory, model=self.model, **options)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, self.width)).square().mean().backward()
        self.optimizer.step()
        self.checkpoint.step()


def _train_on_a_small_disk(group: Group, directory: str) -> tuple[int, str, list[int]]:
    trained = Trained(directory, width=200, every=1)  # 320 kB with momentum
    trained.step()
    trained.checkpoint.wait()
    group.barrier()
    if group.rank == 0:
        Path(directory, "other").write_bytes(bytes(500_000))
    group.barrier()
    trained.step()
    said = ""
    try:
        trained.checkpoint.wait()
    except pl.errors.CheckpointError as error:
        said = str(error)
    group.barrier()
    if group.rank == 0:
        Path(directory, "other").unlink()
    group.barrier()
    trained.step()
    trained.checkpoint.wait()
    group.barrier()
    return (
        trained.checkpoint.steps,
        said,
        [found.step for found in reading.list_checkpoints(Path(directory))],
    )


def test_a_full_disk_costs_one_checkpoint_and_no_step(small_disk: Path) -> None:
    found = run_ranks(2, _train_on_a_small_disk, str(small_disk))
    assert [steps for steps, _, _ in found] == [3, 3]
    assert all(there == [3, 1] for _, _, there in found), "the second one failed whole"
    words = found[0][1] + found[1][1]
    assert "need" in words and "free on" in words and str(small_disk) in words
    assert not list(small_disk.glob(".saving-*"))


def test_what_cannot_be_used_is_refused_on_all_workers(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no directory")

    def battery(group: Group) -> None:
        def refuse(kind: type[Exception], pattern: str, *given: Any, **options: Any) -> None:
            with pytest.raises(kind, match=pattern):
                Trained(*given, **options)

        errors = pl.errors
        refuse(errors.CheckpointError, "cannot be saved in .*file", file / "below")
        refuse(errors.CheckpointError, "there is no checkpoint in", tmp_path / "a", resume="always")
        refuse(errors.UsageError, "every='soon'", tmp_path / "a", every="soon")
        refuse(errors.UsageError, "every=0", tmp_path / "a", every=0)
        refuse(errors.UsageError, "keep=0", tmp_path / "a", keep=0)
        refuse(errors.UsageError, "resume='maybe'", tmp_path / "a", resume="maybe")
        refuse(errors.UsageError, "a list has no state_dict", tmp_path / "a", things=[])
        trained = Trained(tmp_path / "a", every=1)
        trained.step()
        trained.checkpoint.wait()
        group.barrier()
        expected = trained.model.weight.detach().clone()
        refuse(
            errors.CheckpointMismatch, r"weight as \[8, 8\], expected \[9, 9\]", tmp_path / "a", 9
        )
        scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)], 0.1))
        refuse(errors.CheckpointMismatch, "the objects", tmp_path / "a", scheduler=scheduler)
        again = Trained(tmp_path / "a", resume="weights")
        assert again.checkpoint.steps == 0
        assert torch.equal(again.model.weight, expected)
        again.step()

    run_ranks(2, battery)


def test_a_damaged_one_is_said_and_an_older_one_taken(tmp_path: Path) -> None:
    def save(group: Group) -> None:
        trained = Trained(tmp_path, every=1)
        for _ in range(2):
            trained.step()
            trained.checkpoint.wait()
        group.barrier()

    def resume(group: Group) -> tuple[int, str]:
        del group
        trained = Trained(tmp_path)
        assert trained.checkpoint.path is not None
        return trained.checkpoint.steps, trained.checkpoint.path.name

    run_ranks(2, save)
    part = tmp_path / "step-000000002" / "part-00001.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    assert run_ranks(2, resume) == [(1, "step-000000001")] * 2


def test_several_models_and_objects_come_back_by_name(tmp_path: Path) -> None:
    def battery(group: Group, is_first: bool) -> list[Any]:
        first, second = Trained(tmp_path / "x", resume="never"), torch.nn.Linear(3, 3)
        optimizer = torch.optim.Adam(second.parameters(), lr=0.5)
        pl.distribute(second, optimizer)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)  # has an infinity in it
        pl.carry(plateau=plateau)
        checkpoint = pl.Checkpoint(tmp_path / "both")
        if is_first:
            second(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            first.step()
            plateau.step(1.0)
            plateau.step(2.0)
            checkpoint.step()
            checkpoint.save()
            checkpoint.wait()
            group.barrier()
        step = optimizer.state_dict()["state"][0]["step"]
        return [second.weight.tolist(), float(step), plateau.num_bad_epochs, plateau.best]

    before = run_ranks(2, battery, True)
    assert run_ranks(2, battery, False) == before
    assert before[0][2:] == [1, 1.0]
