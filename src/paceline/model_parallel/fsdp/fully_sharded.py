"""FullyShardedModel: each process of the axis fsdp holds a slice of every parameter.

torch's fully_shard does the computing: it gathers the parameters of a block before the block runs,
frees them after it, and leaves each process its slice of the averaged gradient. Its parameters are
DTensors. All other code here (exchange, optimizer, clipping, checkpoints) works on PLAIN local
parameters. The two share their memory:

    plain parameter  ----- values ---->  FSDP's slice      read again at every gather
    plain parameter  <---- gradient ---  FSDP's slice      moved by collect_gradients()

So the next forward sees every write to a plain parameter, and every move to other memory. FSDP
sends slices of equal size; a smaller one (the last ones of a dimension that does not divide) is
padded when it is gathered.

The axis is data parallel: each process computes its own batches, and a gradient is the mean over
the processes of the axis of the gradients of their losses.

Parameters outside of blocks (often: embeddings and the head) are gathered for the entire pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.model_parallel.fsdp.blocks import blocks_of
from paceline.model_parallel.sharding.layout import LocalShard, LocalShards, Slice, SliceSpec
from paceline.model_parallel.tensor.sharded_tensor import ShardedTensor

AXIS = "fsdp"


class FullyShardedModel:
    """A model that is sharded in place, and the plain parameters that this process holds of it."""

    def __init__(
        self, model: nn.Module, device_mesh: DeviceMesh, specs: Mapping[str, SliceSpec]
    ) -> None:
        """Shard the model over the mesh's axis fsdp; the original parameters become empty.

        `specs`: of the model's parameters as they are now, possibly sharded over tp.
        """
        mesh = device_mesh[AXIS]
        originals = dict(model.named_parameters())
        _check(originals)
        self._model = model
        self._params: dict[str, _PlainBackedParam] = {}
        self.shards: LocalShards = {}
        slice_here = Slice(0, mesh.get_local_rank(), mesh.size())
        by_tp = {id(param) for name, param in originals.items() if specs[name].slices}
        for block in _own_blocks(model, by_tp):
            fully_shard(block, mesh=mesh)
            block.register_forward_pre_hook(_gather_inputs, prepend=True, with_kwargs=True)
            self._take_over(block, originals)
        fully_shard(model, mesh=mesh)
        self._take_over(model, originals)
        for name in originals:
            self.shards[name] = LocalShard(self._params[name].plain, specs[name].then(slice_here))
        # FSDP keeps the root gathered after a forward, for backward. If there is none, the next
        # forward must not compute with those values.
        model.register_forward_pre_hook(_free_gathered, prepend=True)

    def collect_gradients(self) -> None:
        """Move the gradients of finished backward passes to the plain parameters, without a copy.

        They are added to the gradients that are there already.
        """
        for param in self._params.values():
            if (grad := param.sharded_param.grad) is None:
                continue
            param.sharded_param.grad = None
            local = cast(DTensor, grad).to_local()
            if param.plain.grad is None:
                param.plain.grad = local
            else:
                param.plain.grad.add_(local)

    def drop_gradients(self) -> None:
        """Set all gradients to None."""
        for param in self._params.values():
            param.plain.grad = None
            param.sharded_param.grad = None

    def refresh(self) -> None:
        """Let FSDP's parameters use the memory of the plain parameters as they are now.

        Call it after plain parameters were moved or materialized. FSDP then holds no memory of its
        own.
        """
        _free_gathered(self._model)
        for param in self._params.values():
            param.reset_sharded_param()

    def _take_over(self, module: nn.Module, originals: Mapping[str, nn.Parameter]) -> None:
        """Link each parameter that FSDP made of this module to a plain one; free the originals."""
        names = {id(param): name for name, param in self._model.named_parameters()}
        for param in _params_of(module):
            name = names[id(param.sharded_param)]
            self._params[name] = _PlainBackedParam.of(param, name)
            original = originals[name]
            original.grad = None
            original.data = original.data.new_empty(0)


class _PlainBackedParam(FSDPParam):
    """FSDP's parameter, which uses the memory of a plain one at any time."""

    plain: nn.Parameter
    name: str

    @classmethod
    def of(cls, param: FSDPParam, name: str) -> _PlainBackedParam:
        """Link FSDP's parameter to a new plain one, which takes over its memory."""
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
        """What FSDP sends of this process when it gathers: flat, padded to the largest size."""
        flat = self.plain.detach().reshape(-1)
        missing = self.padded_sharded_param_size.numel() - flat.numel()
        return nn.functional.pad(flat, (0, missing)) if missing else flat

    def reset_sharded_param(self) -> None:
        """Use the plain parameter's memory; FSDP calls this before the first forward too."""
        module, name = self._module_info.module, self._module_info.param_name
        if getattr(module, name) is not self.sharded_param:
            raise UsageError(
                f"parameter {self.name}: it was replaced by another after fsdp had sharded it;"
                " change its values in place, or replace it before distribute()"
            )
        local = self.plain.detach()
        if self.sharded_param.device == local.device:
            self.sharded_param._local_tensor = local
            return
        # A DTensor keeps its first device: the plain parameter was on meta until now.
        self.sharded_param = nn.Parameter(
            self.to_sharded_dtensor(local), requires_grad=self.plain.requires_grad
        )
        self._setattr_on_modules(self.sharded_param)


def _gather_inputs(_: nn.Module, inputs: Any, named: Any) -> tuple[Any, Any]:
    """Gather the inputs of a block: FSDP's hooks do not know the sharded tensors of tp."""

    def full(one: Any) -> Any:
        return one.full_tensor() if isinstance(one, ShardedTensor) else one

    return pytree.tree_map(full, inputs), pytree.tree_map(full, named)


def _own_blocks(model: nn.Module, by_tp: set[int]) -> Iterator[nn.Module]:
    """Yield the blocks that share no parameter with the rest of the model.

    Tied parameters must be gathered together, so such a block is gathered with what is around it.
    So is a single layer that tp has sharded (`by_tp`, ids of parameters): it returns sharded
    tensors.
    """
    for block in blocks_of(model).values():
        if any(id(param) in by_tp for param in block.parameters(recurse=False)):
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
                f"parameter {name} is a single number without dimensions, which fsdp cannot shard;"
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
            " convert them to one dtype; to compute in bfloat16 use precision='bf16'"
        )


def _params_of(module: nn.Module) -> list[FSDPParam]:
    assert isinstance(module, FSDPModule)
    group = module._get_fsdp_state()._fsdp_param_group
    return [] if group is None else group.fsdp_params


def _free_gathered(model: nn.Module, *_: object) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
