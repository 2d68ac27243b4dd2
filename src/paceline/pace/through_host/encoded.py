"""Buckets that are encoded on the device, so that only payloads are copied to the host and back.

    fetch    the device encodes (compress/on_device.py); payload and small tensors go to the host
    send     payloads of the mean go to the device, which decodes them

The exchange between the workers is that of the CPU, with the same payloads. Error feedback is kept
on the device. Which codecs run there:

    fp16, bf16, int8, onebit   with error feedback, the error of the second rounding, which is known
                               to the host, follows in full precision: of this worker's slice
    topk                       if no other codec encodes its values; the host packs and reads the
                               indices
    powersgd                   if the device has collectives: nothing goes through the host
                               (compress/powersgd_on_device.py)

All others, and averages that hosts make first (pace/hierarchical.py), are encoded on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.device_group import DeviceGroup
from paceline.comm.device_route import Errand
from paceline.comm.devices import is_on_device
from paceline.compress import on_device
from paceline.compress.kernels import Draw
from paceline.compress.powersgd import PowerSGDReduction
from paceline.compress.powersgd_on_device import PowerSGDOnDevice
from paceline.compress.quantizers import SlicedReduction
from paceline.compress.reduction import AllGatherReduction, CompressedReduction
from paceline.compress.sparsifiers import TopK
from paceline.pace.exchange import Bucket, Exchange
from paceline.pace.through_host.exchange import HostBuckets, ThroughHost
from paceline.pace.through_host.host_bucket import HostBucket
from paceline.runtime.work import Handle


class EncodedBucket(HostBucket):
    """A bucket of which the host sees payloads only."""

    def __init__(self, bucket: Bucket, hosts: HostBuckets, reduction: CompressedReduction) -> None:
        super().__init__(bucket, hosts.route)
        self._reduction, self._layout = reduction, reduction.layout
        self._device = bucket.grads.device
        self._memory["small mean"] = reduction.small_mean
        self._targets: dict[str, torch.Tensor] = {}  # on the device, by name
        self._arriving: Errand[None] | None = None  # the last part of a step that was encoded
        reduction.is_decoded_elsewhere = True

    def fetch_step(self, step: int) -> Errand[None]:
        if self._arriving is None or not self._reduction.is_encoded(step):
            with torch.no_grad():
                self._arriving = self._encode(self.on_device.grads, step)
            self._reduction.take_encoded(step)
        return self._arriving

    def _encode(self, values: torch.Tensor, step: int) -> Errand[None]:
        """Encode on the device, and start to copy; the last of all errands is returned."""
        raise NotImplementedError

    def _fetch_small(self, values: torch.Tensor) -> None:
        if self._layout.small:
            small = torch.cat([span.of(values) for span in self._layout.small])
            self._route.send(small, self._reduction.small, _nothing)

    def send_averages(self) -> None:
        with torch.no_grad():
            averaged = self.on_device.averaged
            self._decode(averaged)
            if self._layout.small:
                self._layout.unpack_small(self._on_device("small mean"), averaged)

    def _decode(self, averaged: torch.Tensor) -> None:
        raise NotImplementedError

    def _on_device(self, name: str) -> torch.Tensor:
        """Copy memory of the host to the device, before what the current stream does next."""
        host = self._memory[name]
        if name not in self._targets or self._targets[name].numel() != host.numel():
            self._targets[name] = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        self._send(name, self._targets[name])
        return self._targets[name]

    def release_averages(self) -> None:
        for name in list(self._sent):
            self._release(name)


class EncodedBlocks(EncodedBucket):
    """fp16, bf16, int8 and onebit: payloads that can be cut and averaged on the host."""

    _reduction: SlicedReduction

    def __init__(self, bucket: Bucket, hosts: HostBuckets, reduction: SlicedReduction) -> None:
        super().__init__(bucket, hosts, reduction)
        self._form = reduction.codec.format
        self._memory["result"] = reduction.result
        reduction.move_residual(self._device)

    def _encode(self, values: torch.Tensor, step: int) -> Errand[None]:  # noqa: ARG002
        error, left = self._reduction.take_row_error(), self._reduction.residual
        if error is not None and error.numel():
            self._memory["row error"] = error
            self._reduction.add_row_error(self._on_device("row error"))
        parts = []
        for span in self._layout.large:
            residual = None if left is None else span.of(left)
            parts.append(on_device.encode_blocks(self._form, span.of(values), residual))
        self._fetch_small(values)
        return self._route.send(torch.cat(parts), self._reduction.payload, _nothing)

    def _decode(self, averaged: torch.Tensor) -> None:
        result, at = self._on_device("result"), 0
        for span in self._layout.large:
            end = at + self._form.payload_bytes(span.count)
            on_device.decode_blocks(self._form, result[at:end], span.of(averaged))
            at = end


class EncodedTopK(EncodedBucket):
    """topk: the device selects and scatters; the host packs and reads the indices."""

    _reduction: AllGatherReduction

    def __init__(self, bucket: Bucket, hosts: HostBuckets, reduction: AllGatherReduction) -> None:
        super().__init__(bucket, hosts, reduction)
        assert isinstance(reduction.codec, TopK)
        self._codec, self._allocate = reduction.codec, hosts.allocate
        if reduction.residual is not None:
            reduction.residual = reduction.residual.to(self._device)
        self._counts = [self._codec.count(span.count) for span in self._layout.large]
        total = sum(self._counts)
        self._indices = hosts.allocate(total, torch.int32)
        self._chosen = hosts.allocate(total, torch.float32)

    def _encode(self, values: torch.Tensor, step: int) -> Errand[None]:  # noqa: ARG002
        left, found = self._reduction.residual, list[tuple[torch.Tensor, torch.Tensor]]()
        for span, count in zip(self._layout.large, self._counts, strict=True):
            residual = None if left is None else span.of(left)
            found.append(on_device.select(span.of(values), count, residual))
        self._fetch_small(values)
        indices, chosen = (torch.cat(parts) for parts in zip(*found, strict=True))
        self._route.send(indices, self._indices, _nothing)
        return self._route.send(chosen, self._chosen, self._pack)

    def _pack(self) -> None:
        """Write the payloads; runs as an errand, when indices and values are here."""
        pairs = zip(self._split(self._indices), self._split(self._chosen), strict=True)
        for number, (indices, chosen) in enumerate(pairs):
            size, payload = self._layout.large[number].count, self._reduction.payload_of(number)
            self._codec.pack(payload, size, indices, chosen, None, Draw(0, 0))

    def _split(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        parts: Sequence[torch.Tensor] = flat.split(self._counts, -1)
        return parts

    def _decode(self, averaged: torch.Tensor) -> None:
        self._read()
        indices, chosen = self._on_device("all indices"), self._on_device("all chosen")
        parts = zip(self._layout.large, self._split(indices), self._split(chosen), strict=True)
        for span, where, values in parts:
            on_device.scatter_mean(where, values, span.of(averaged))

    def _read(self) -> None:
        """Read the payloads of all workers, a row for each."""
        rows, total = len(self._reduction.payloads_of(0)), sum(self._counts)
        known = self._memory.get("all indices")
        if known is None or known.shape[0] != rows:
            for name, dtype in (("all indices", torch.int32), ("all chosen", torch.float32)):
                self._memory[name] = self._allocate(rows * total, dtype).view(rows, total)
        indices = self._split(self._memory["all indices"])
        chosen = self._split(self._memory["all chosen"])
        for number, span in enumerate(self._layout.large):
            for row, payload in enumerate(self._reduction.payloads_of(number)):
                found = torch.empty(self._counts[number], dtype=torch.int32)
                chosen[number][row].copy_(self._codec.unpack(payload, span.count, found))
                indices[number][row].copy_(found)


class EncodedThroughHost(ThroughHost):
    """Runs a compressed average; buckets whose codec can do it are encoded on the device."""

    def __init__(
        self, inner: Exchange, hosts: HostBuckets, collectives: DeviceGroup | None = None
    ) -> None:
        """`collectives`: of the device, for codecs that run there alone."""
        super().__init__(inner, hosts)
        self._collectives = collectives
        self._encoded: dict[int, EncodedBucket] = {}  # by bucket index
        self._direct: dict[int, PowerSGDOnDevice] = {}

    def take(self, buckets: Sequence[Bucket]) -> None:
        super().take(buckets)
        for bucket in buckets:
            reduction = self._inner.reduction_of(bucket)
            collectives = self._collectives if is_on_device(bucket.grads) else None
            if collectives is not None and isinstance(reduction, PowerSGDReduction):
                self._direct[bucket.index] = PowerSGDOnDevice(reduction, collectives)
                continue
            made = None if reduction is None else _encode_there(bucket, self._hosts, reduction)
            if made is not None:
                self._encoded[bucket.index] = made

    def submit(self, bucket: Bucket, step: int) -> Handle:
        direct = self._direct.get(bucket.index)
        if direct is None:
            return super().submit(bucket, step)
        return direct.submit(bucket.grads, bucket.averaged, step)

    def _host_of(self, bucket: Bucket) -> HostBucket:
        return self._encoded.get(bucket.index) or super()._host_of(bucket)


def _encode_there(
    bucket: Bucket, hosts: HostBuckets, reduction: CompressedReduction
) -> EncodedBucket | None:
    """Return the bucket that is encoded on its device; None: its codec runs on the host."""
    codec = reduction.codec
    if bucket.grads.device.type == "cpu":
        return None
    if type(reduction) is SlicedReduction:
        known = reduction.codec.format.name in on_device.FORMATS
        return EncodedBlocks(bucket, hosts, reduction) if known else None
    if type(reduction) is AllGatherReduction and type(codec) is TopK and codec.has_plain_values:
        return EncodedTopK(bucket, hosts, reduction)
    return None


def _nothing() -> None:
    """Follow a copy with nothing else."""
