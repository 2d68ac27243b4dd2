"""Sharded: each process of the axis fsdp holds a slice of every parameter.

torch's fully_shard does the computing: it gathers the parameters of a block before the block runs,
forgets them behind it, and leaves each process its slice of the averaged gradient. Its parameters
are DTensors. Everything else of ours (exchange, optimizer, clipping, checkpoints) works on PLAIN
local parameters, so there are two sides here, with one memory:

    plain parameter  ----- values ---->  FSDP's slice      read anew at every gathering
    plain parameter  <---- gradient ---  FSDP's slice      moved by collect()

Whatever moves the plain parameter to other memory or writes to it is thus seen by the next forward.
FSDP sends slices of equal size; a smaller one (the last ones of a dimension that does not divide)
is padded in passing, when it is gathered.

The axis is data parallel: each process computes its own batches, and a gradient is the mean over
the processes of the axis of the gradients of their losses.

What is in no block (often: embeddings and the head) is gathered for the whole pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.model_parallel.fsdp.blocks import blocks_of
from paceline.model_parallel.parts.layout import Held, Holding, Part, Slice

AXIS = "fsdp"


class Sharded:
    """A model that was sharded in place, and the plain parameters that this process has of it."""

    def __init__(
        self,
        model: nn.Module,
        device_mesh: DeviceMesh,
        parts: Mapping[str, Part],
        precision: str = "fp32",
    ) -> None:
        """Shard the model over the mesh's axis fsdp; the original parameters become empty.

        `parts`: what of the whole model's parameters is there now. `precision`: "fp32" computes in
        the parameters' own dtype; "bf16" gathers and computes in bfloat16, while parameters,
        gradients, the model's output and the optimizer keep float32.
        """
        mesh = device_mesh[AXIS]
        originals = dict(model.named_parameters())
        _check(originals)
        self._model = model
        self._followers: dict[str, _Follower] = {}
        self.holding = Holding()
        self.replacements: dict[nn.Parameter, nn.Parameter] = {}
        piece = Slice(0, mesh.get_local_rank(), mesh.size())
        inside, outside = _policies(precision)
        cut = {id(param) for name, param in originals.items() if parts[name].slices}
        for block in _own_blocks(model, cut):
            fully_shard(block, mesh=mesh, mp_policy=inside)
            block.register_forward_pre_hook(_take_whole, prepend=True, with_kwargs=True)
            self._take_over(block, originals)
        fully_shard(model, mesh=mesh, mp_policy=outside)
        self._take_over(model, originals)
        for name, original in originals.items():
            plain = self._followers[name].plain
            self.holding.held[name] = Held(plain, parts[name].then(piece))
            self.replacements[original] = plain
        # FSDP leaves the root gathered behind a forward, for backward. If there is none, the next
        # forward must not compute with those values.
        model.register_forward_pre_hook(_forget_gathered, prepend=True)

    def collect(self) -> None:
        """Move the gradients of finished backward passes to the plain parameters, without a copy.

        A gradient that is there already is added to.
        """
        for follower in self._followers.values():
            if (grad := follower.sharded_param.grad) is None:
                continue
            follower.sharded_param.grad = None
            local = cast(DTensor, grad).to_local()
            if follower.plain.grad is None:
                follower.plain.grad = local
            else:
                follower.plain.grad.add_(local)

    def drop(self) -> None:
        """Forget all gradients."""
        for follower in self._followers.values():
            follower.plain.grad = None
            follower.sharded_param.grad = None

    def refresh(self) -> None:
        """Let FSDP's side show the plain parameters as they are now.

        To be called when they have been moved or made real; FSDP then holds no memory of its own.
        """
        _forget_gathered(self._model)
        for follower in self._followers.values():
            follower.reset_sharded_param()

    def _take_over(self, module: nn.Module, originals: Mapping[str, nn.Parameter]) -> None:
        """Put a plain parameter behind each that FSDP made of this module, and free the wholes."""
        names = {id(param): name for name, param in self._model.named_parameters()}
        for param in _params_of(module):
            name = names[id(param.sharded_param)]
            self._followers[name] = _Follower.of(param, name)
            whole = originals[name]
            whole.grad = None
            whole.data = whole.data.new_empty(0)


class _Follower(FSDPParam):
    """FSDP's parameter, whose values are those of a plain one at any time."""

    plain: nn.Parameter
    name: str

    @classmethod
    def of(cls, param: FSDPParam, name: str) -> _Follower:
        """Turn FSDP's parameter into one that follows a new plain one, which takes its memory."""
        requires_grad = param.sharded_param.requires_grad
        local = cast(DTensor, param.sharded_param.detach()).to_local()
        del param._sharded_param_data  # from now on a property
        param.__class__ = cls
        assert isinstance(param, cls)
        param.name = name
        param.plain = nn.Parameter(local, requires_grad=requires_grad)
        return param

    @property
    def _sharded_param_data(self) -> torch.Tensor:  # type: ignore[override]
        """What FSDP sends of this process when it gathers: flat, of the size of the largest."""
        flat = self.plain.detach().reshape(-1)
        missing = self.padded_sharded_param_size.numel() - flat.numel()
        return nn.functional.pad(flat, (0, missing)) if missing else flat

    def reset_sharded_param(self) -> None:
        """Show the plain parameter's memory; FSDP calls this before the first forward too."""
        module, name = self._module_info.module, self._module_info.param_name
        if getattr(module, name) is not self.sharded_param:
            raise UsageError(
                f"parameter {self.name}: it was replaced by another behind the sharding over fsdp;"
                " change its values in place, or replace it before distribute()"
            )
        local = self.plain.detach()
        if self.sharded_param.device == local.device:
            self.sharded_param._local_tensor = local
            return
        # A DTensor keeps the device that it was made for: the plain one was on meta until now.
        self.sharded_param = nn.Parameter(
            self.to_sharded_dtensor(local), requires_grad=self.plain.requires_grad
        )
        self._setattr_on_modules(self.sharded_param)


def _policies(precision: str) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """Return FSDP's policies for blocks and for the whole model."""
    if precision == "fp32":
        return MixedPrecisionPolicy(), MixedPrecisionPolicy()
    if precision == "bf16":
        low: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        # A loss is computed from the output outside of the model: in float32.
        return MixedPrecisionPolicy(**low), MixedPrecisionPolicy(**low, output_dtype=torch.float32)
    raise UsageError(f"precision {precision!r} with fsdp; it is 'fp32' or 'bf16'")


def _take_whole(_: nn.Module, inputs: Any, named: Any) -> tuple[Any, Any]:
    """Let a block be given whole tensors: FSDP's hooks do not know pieces that tp has made."""

    def whole(one: Any) -> Any:
        return one.whole() if isinstance(one, torch.Tensor) and hasattr(one, "whole") else one

    return pytree.tree_map(whole, inputs), pytree.tree_map(whole, named)


def _own_blocks(model: nn.Module, cut: set[int]) -> Iterator[nn.Module]:
    """Yield the blocks that share no parameter with the rest of the model.

    Tied parameters must be gathered together; the rest of such a block goes with what is around it.
    So does a single layer that tp has cut (`cut`, ids of parameters): it hands on pieces.
    """
    for block in blocks_of(model).values():
        if any(id(param) in cut for param in block.parameters(recurse=False)):
            continue
        inside = set(block.modules())
        params = set(block.parameters())
        others = (module for module in model.modules() if module not in inside)
        if not any(p in params for module in others for p in module.parameters(recurse=False)):
            yield block


def _check(originals: Mapping[str, nn.Parameter]) -> None:
    dtypes: dict[torch.dtype, str] = {}
    for name, param in originals.items():
        if param.dim() == 0:
            raise UsageError(
                f"parameter {name} is a single number without dimensions, which fsdp cannot cut;"
                " give it the shape (1,)"
            )
        if param.requires_grad:
            dtypes.setdefault(param.dtype, name)
        if not param.is_contiguous():
            param.data = param.data.contiguous()
    if len(dtypes) > 1:
        found = " and ".join(f"{dtype} ({name})" for dtype, name in dtypes.items())
        raise UsageError(
            f"the model's parameters are of {found}; fsdp averages their gradients together, so"
            " convert them to one dtype; for a computation in bfloat16 use precision='bf16'"
        )


def _params_of(module: nn.Module) -> list[FSDPParam]:
    assert isinstance(module, FSDPModule)
    group = module._get_fsdp_state()._fsdp_param_group
    return [] if group is None else group.fsdp_params


def _forget_gathered(model: nn.Module, *_: object) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
