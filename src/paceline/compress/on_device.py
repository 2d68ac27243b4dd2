"""Codecs with torch operations, for values on a device: less is copied to the host and back.

The payloads have the format of the CPU kernels (blocks.py), so a worker with a device and one
without can be in one job. The operations are the same, in the same order and precision:

    fp16, bf16, int8   the same bytes, if the device rounds as IEEE 754 says (division included);
                       of a NaN in bf16 other bits
    onebit             the same bits; the two means of a block may differ in the last place, where
                       a device adds doubles in another order
    topk               the same selection, except among values of the same magnitude at the border,
                       where the CPU takes the lower index and a device any of them

No function waits for the device.
"""

from __future__ import annotations

import torch

from paceline.compress.blocks import BlockFormat

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
_LEVELS = 127
_LEAST_STEP = torch.finfo(torch.float32).tiny  # a smaller step has too few bits: it becomes 0
FORMATS = (*_HALF, "int8", "onebit")


def encode_blocks(
    form: BlockFormat, values: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the payload (uint8) of a flat tensor, on its device.

    With a residual, values + residual are encoded, and it becomes what the payload lacks; where
    this is not finite it stays as it was.
    """
    if residual is None:
        return _encode(form, values)
    wanted = values + residual
    payload, decoded = _encode(form, wanted), torch.empty_like(wanted)
    decode_blocks(form, payload, decoded)
    residual.copy_(torch.where(torch.isfinite(decoded), wanted - decoded, residual))
    return payload


def _encode(form: BlockFormat, values: torch.Tensor) -> torch.Tensor:
    padding = form.num_blocks(values.numel()) * form.values - values.numel()
    padded = torch.nn.functional.pad(values, (0, padding)) if padding else values
    if form.name in _HALF:
        return padded.to(_HALF[form.name]).view(torch.uint8)
    blocks = padded.view(-1, form.values)
    if form.name == "onebit":
        return _encode_signs(blocks, values.numel())
    step = blocks.abs().amax(1, keepdim=True) / _LEVELS
    step = torch.where(torch.isfinite(step), step, torch.nan)
    step = torch.where(step < _LEAST_STEP, 0.0, step)
    is_too_large = torch.isinf(step * _LEVELS)  # by rounding
    step = torch.where(is_too_large, torch.nextafter(step, torch.zeros_like(step)), step)
    levels = torch.where(step > 0, (blocks * (1.0 / step)).round_(), 0.0).to(torch.int8)
    return torch.cat([step.view(torch.uint8), levels.view(torch.uint8)], 1).view(-1)


def _encode_signs(blocks: torch.Tensor, count: int) -> torch.Tensor:
    """Encode blocks as two means and a bit for each value; only `count` values are not padding."""
    number = torch.arange(blocks.numel(), device=blocks.device).view_as(blocks)
    is_value, is_finite = number < count, torch.isfinite(blocks).all(1, keepdim=True)
    is_minus = blocks < 0
    heads = []
    for side in (~is_minus & is_value, is_minus & is_value):
        total = _sum_in_order(torch.where(side, blocks, 0))
        mean = (total / side.sum(1).clamp(min=1)).float()
        heads.append(torch.where(is_finite[:, 0], mean, torch.nan))
    weights = 2 ** torch.arange(8, device=blocks.device)
    is_plus = ~is_minus & is_value & is_finite
    bits = (is_plus.view(len(blocks), -1, 8) * weights).sum(2).to(torch.uint8)
    return torch.cat([torch.stack(heads, 1).view(torch.uint8), bits], 1).view(-1)


def _sum_in_order(blocks: torch.Tensor) -> torch.Tensor:
    """Add the values of each block as plain_onebit.h does: eights in pairs as floats, the rest as
    doubles."""
    eights = blocks.view(len(blocks), -1, 8, 8)
    while eights.shape[2] > 1:
        eights = eights[:, :, 0::2] + eights[:, :, 1::2]
    total = eights.double().sum((1, 2, 3))
    return torch.where(torch.isfinite(total), total, blocks.sum(1, dtype=torch.float64))


def _decode_signs(blocks: torch.Tensor) -> torch.Tensor:
    heads = blocks[:, :8].contiguous().view(torch.float32)
    weights = 2 ** torch.arange(8, device=blocks.device, dtype=torch.uint8)
    is_plus = (blocks[:, 8:, None] & weights).ne(0).view(len(blocks), -1)
    return torch.where(is_plus, heads[:, :1], heads[:, 1:])


def decode_blocks(form: BlockFormat, payload: torch.Tensor, out: torch.Tensor) -> None:
    """Write the numbers of a payload to a flat tensor on the same device."""
    if form.name in _HALF:
        out.copy_(payload.view(_HALF[form.name])[: out.numel()])
        return
    blocks = payload.view(-1, form.num_bytes)
    if form.name == "onebit":
        out.copy_(_decode_signs(blocks).view(-1)[: out.numel()])
        return
    step = blocks[:, :4].contiguous().view(torch.float32)
    values = blocks[:, 4:].contiguous().view(torch.int8).to(torch.float32).mul_(step)
    out.copy_(values.view(-1)[: out.numel()])


def select(
    values: torch.Tensor, k: int, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices (int32, ascending) and values of the k largest of values + residual.

    They are selected as in sparse_format.select; `residual` becomes what was not selected.
    """
    wanted = values if residual is None else values + residual
    sizes = torch.where(torch.isfinite(wanted), wanted.abs(), torch.inf)
    indices = torch.topk(sizes, k, sorted=False).indices.sort().values
    chosen = wanted.index_select(0, indices)
    if residual is not None:
        residual.copy_(wanted.index_fill(0, indices, 0.0))
    return indices.to(torch.int32), chosen


def scatter_mean(indices: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
    """Write the mean of sparse rows, each a row of both tensors, to `out`."""
    out.zero_()
    for where, row in zip(indices, chosen / indices.shape[0], strict=True):
        out.index_add_(0, where, row)
