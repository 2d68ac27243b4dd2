"""ModelProfile: what the planner must know of a model, measured or written by hand.

A STEP of one worker is: input, forward, backward, optimizer. During backward, buckets become ready
one after the other; READY is the time since the start of backward. All times are means over the
measured steps, on one process that computes and does not exchange; CV is the standard deviation of
a step divided by its mean.

The file (model.json) is what `paceline plan --save-profile` writes. By hand, three fields are
enough: {"parameters_bytes": 400e6, "compute_s": 0.35, "batch": 32}.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from paceline.errors import ConfigError

_BUCKET_BYTES = 25 * 10**6  # of the buckets of a profile that names none
_BACKWARD_SHARE = 2 / 3  # of computation, if only its sum is known
# State that an optimizer keeps, relative to the parameters.
STATE_FACTORS = {
    **{"SGD": 0.0, "Adagrad": 1.0, "RMSprop": 1.0, "Adam": 2.0, "AdamW": 2.0, "NAdam": 2.0},
    **{"RAdam": 2.0, "Adamax": 2.0, "Adadelta": 2.0, "momentum": 1.0},
}
_Positive = Annotated[float, Meta(gt=0)]
_NotNegative = Annotated[float, Meta(ge=0)]


class BucketProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One bucket, in the order in which the reducer exchanges them."""

    num_bytes: Annotated[int, Meta(ge=0)]
    ready_s: _NotNegative  # since the start of backward


class ModelProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The times and sizes of one worker's step."""

    name: str
    batch: int  # samples of one worker in a step
    forward_s: float
    backward_s: float
    optimizer_s: float
    input_s: float
    buckets: tuple[BucketProfile, ...]
    cv: float = 0.0  # of a step
    state_factor: float = 0.0  # optimizer state, relative to the parameters
    activation_bytes: int = 0
    process_bytes: int = 0  # of the measured process, all included; 0: not measured
    num_layers: int = 0  # of equal blocks, for pp and tp; 0: unknown
    hidden_bytes: int = 0  # of the activation between two blocks, of one batch; 0: unknown
    steps: int = 0  # that were measured; 0: written by hand
    threads: int = 1  # of the process that was measured

    @property
    def parameters_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def compute_s(self) -> float:
        """Input, forward, backward and optimizer: a step without any exchange."""
        return self.input_s + self.forward_s + self.backward_s + self.optimizer_s

    @property
    def state_bytes(self) -> float:
        """Parameters, gradients and optimizer state of a whole copy."""
        return self.parameters_bytes * (2 + self.state_factor)

    @property
    def memory_bytes(self) -> float:
        """What a process with a whole copy needs."""
        return max(self.process_bytes, self.state_bytes + self.activation_bytes)

    def scaled(self, factor: float) -> ModelProfile:
        """Return the profile on cores that are so many times slower."""
        return msgspec.structs.replace(
            self,
            forward_s=self.forward_s * factor,
            backward_s=self.backward_s * factor,
            optimizer_s=self.optimizer_s * factor,
            input_s=self.input_s * factor,
            buckets=tuple(
                BucketProfile(one.num_bytes, one.ready_s * factor) for one in self.buckets
            ),
        )


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model.json as a person writes it."""

    name: str = "model"
    batch: Annotated[int, Meta(ge=1)] = 1
    parameters_bytes: _Positive | None = None
    compute_s: _Positive | None = None
    forward_s: _NotNegative | None = None
    backward_s: _NotNegative | None = None
    optimizer_s: _NotNegative = 0.0
    input_s: _NotNegative = 0.0
    buckets: tuple[BucketProfile, ...] = ()
    cv: _NotNegative = 0.0
    state_factor: _NotNegative | None = None
    optimizer: str = ""
    activation_bytes: Annotated[int, Meta(ge=0)] = 0
    process_bytes: Annotated[int, Meta(ge=0)] = 0
    num_layers: Annotated[int, Meta(ge=0)] = 0
    hidden_bytes: Annotated[int, Meta(ge=0)] = 0
    steps: Annotated[int, Meta(ge=0)] = 0
    threads: Annotated[int, Meta(ge=1)] = 1


def even_buckets(parameters_bytes: float, backward_s: float) -> tuple[BucketProfile, ...]:
    """Return buckets of up to 25 MB whose gradients arrive at a constant rate."""
    count = max(1, math.ceil(parameters_bytes / _BUCKET_BYTES))
    borders = [round(parameters_bytes * at / count) for at in range(count + 1)]
    return tuple(
        BucketProfile(borders[at + 1] - borders[at], backward_s * (at + 1) / count)
        for at in range(count)
    )


def read_profile(path: Path) -> ModelProfile:
    """Read a model.json; raise ConfigError with the field that is wrong."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; `paceline plan --save-profile {path} train.py` writes it"
        ) from None
    try:
        return _complete(msgspec.json.decode(text, type=_File), str(path))
    except msgspec.DecodeError as error:
        known = ", ".join(_File.__struct_fields__)
        raise ConfigError(f"{path}: {error}; a profile has the fields {known}") from None


def _complete(given: _File, where: str) -> ModelProfile:
    forward_s, backward_s = given.forward_s, given.backward_s
    if forward_s is None or backward_s is None:
        if given.compute_s is None:
            raise ConfigError(
                f"{where}: a profile needs compute_s, or both forward_s and backward_s, in seconds"
            )
        rest_s = given.compute_s - given.optimizer_s - given.input_s
        if rest_s <= 0:
            raise ConfigError(
                f"{where}: compute_s is {given.compute_s:g} s, but input_s and optimizer_s alone"
                f" are {given.optimizer_s + given.input_s:g} s; compute_s is their sum with forward"
                " and backward"
            )
        backward_s = rest_s * _BACKWARD_SHARE if backward_s is None else backward_s
        forward_s = max(0.0, rest_s - backward_s) if forward_s is None else forward_s
    if forward_s + backward_s <= 0:
        raise ConfigError(f"{where}: forward_s and backward_s are 0: the model computes nothing")
    if not given.buckets and given.parameters_bytes is None:
        raise ConfigError(f"{where}: a profile needs parameters_bytes or buckets")
    buckets = given.buckets or even_buckets(given.parameters_bytes or 0, backward_s)
    if sum(bucket.num_bytes for bucket in buckets) <= 0:
        raise ConfigError(f"{where}: the model has no parameters: there is nothing to exchange")
    factor = given.state_factor
    if factor is None:
        if given.optimizer and given.optimizer not in STATE_FACTORS:
            raise ConfigError(
                f"{where}: optimizer {given.optimizer!r} is unknown here; give state_factor, the"
                f" size of its state relative to the parameters (known: {', '.join(STATE_FACTORS)})"
            )
        factor = STATE_FACTORS.get(given.optimizer, 0.0)
    return ModelProfile(
        name=given.name,
        batch=given.batch,
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=given.optimizer_s,
        input_s=given.input_s,
        buckets=buckets,
        cv=given.cv,
        state_factor=factor,
        activation_bytes=given.activation_bytes,
        process_bytes=given.process_bytes,
        num_layers=given.num_layers,
        hidden_bytes=given.hidden_bytes,
        steps=given.steps,
        threads=given.threads,
    )


def write_profile(profile: ModelProfile, path: Path) -> None:
    """Write a profile that `read_profile` reads."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
