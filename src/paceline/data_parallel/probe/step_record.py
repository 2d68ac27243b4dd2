"""The tensors of the first steps, for `paceline parity`.

Each worker writes one line per step: its loss, its samples, checksums of the samples and of the
parameters after the step. Worker 0 also writes the tensors: `start.npz` before the first step, and
`step-K.npz` with "gradient NAME" (as the optimizer gets them) and "parameter NAME", "buffer NAME"
(after the step). A file has its name when it is complete.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.data_parallel.hooks import UncopiedHook, nothing, replace_method
from paceline.runtime.job import Job

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_LIVE_NORMS = nn.modules.batchnorm._BatchNorm


class StepRecord:
    """Writes the first `steps` steps of one model into a directory."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settle: Callable[[], None],
        directory: Path,
        steps: int,
    ) -> None:
        self._job, self._model, self._optimizer = job, model, optimizer
        self._settle = settle
        self._directory, self._steps, self._done = directory, steps, 0
        self._losses: list[torch.Tensor] = []
        self._samples: list[int] = []
        self._rank = job.env.rank
        self._lines = (directory / f"worker-{self._rank}.jsonl").open("a", encoding="utf-8")
        if self._rank == 0:
            self._write_start()
        model.register_forward_pre_hook(UncopiedHook(self._note_input, nothing))

        def step(_: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
            return self._watch_step(*arguments, **named)

        self._step = replace_method(optimizer, "step", step)

    def note_loss(self, loss: torch.Tensor | None) -> None:
        """Add the loss of a backward pass."""
        if loss is not None and self._done < self._steps:
            self._losses.append(loss)

    def _note_input(self, module: nn.Module, arguments: Any) -> None:
        """Add a checksum of each sample of a training batch: a row of the first tensor."""
        if module is not self._model or not torch.is_grad_enabled() or self._done >= self._steps:
            return
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        if tensors and tensors[0].dim() > 0:
            rows = _array(tensors[0])
            self._samples += [zlib.crc32(np.ascontiguousarray(row).tobytes()) for row in rows]

    def _watch_step(self, *arguments: Any, **named: Any) -> Any:
        if self._done >= self._steps:
            return self._step(*arguments, **named)
        gradients = dict(_gradients(self._model)) if self._rank == 0 else {}
        result = self._step(*arguments, **named)
        self._done += 1
        self._settle()  # from servers the new parameters may arrive later
        self._write_step(gradients)
        return result

    def _write_step(self, gradients: dict[str, np.ndarray]) -> None:
        state = dict(_state(self._model))
        line = {
            "step": self._done,
            "loss": float(torch.stack(self._losses).sum()) if self._losses else None,
            "weight": self._job.contribution.weight,
            "samples": self._samples,
            "sums": {name: zlib.crc32(values.tobytes()) for name, values in state.items()},
        }
        self._losses, self._samples = [], []
        if self._rank == 0:
            _write(self._directory / f"step-{self._done}.npz", {**gradients, **state})
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()

    def _write_start(self) -> None:
        _write(self._directory / "start.npz", dict(_state(self._model)))
        facts = {
            "dropouts": sum(
                isinstance(one, _DROPOUT) and one.p > 0 for one in self._model.modules()
            ),
            "norms": sum(isinstance(one, _LIVE_NORMS) for one in self._model.modules()),
            "optimizer": type(self._optimizer).__name__,
            "dtypes": {name: str(one.dtype) for name, one in self._model.named_parameters()},
        }
        (self._directory / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def _gradients(model: nn.Module) -> Iterator[tuple[str, np.ndarray]]:
    for name, param in model.named_parameters():
        if param.grad is not None:
            yield f"gradient {name}", _array(param.grad)


def _state(model: nn.Module) -> Iterator[tuple[str, np.ndarray]]:
    for name, param in model.named_parameters():
        yield f"parameter {name}", _array(param)
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", _array(buffer)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy as numpy's type; what numpy lacks (bfloat16, sparse) becomes float32, dense."""
    plain = tensor.detach().cpu()
    plain = plain.to_dense() if plain.layout is not torch.strided else plain
    return (plain.float() if plain.dtype is torch.bfloat16 else plain).clone().numpy()


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write tensors so that a reader finds the file whole, or not at all."""
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # any name is allowed
    unfinished.rename(path)
