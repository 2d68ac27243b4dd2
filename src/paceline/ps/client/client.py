"""`ps.Client`: named arrays on parameter servers, for scripts with gradients of any kind.

    client = ps.Client("async")
    client.init("weights", numpy.zeros(10), optimizer="SGD", lr=0.1)
    weights = client.push_pull("weights", gradient).wait()

Arrays are numpy's, torch's, or anything with DLPack or the buffer protocol. Servers apply what is
pushed with the optimizer that the key was made with. A WORKER of a key pushes, and its reads obey
the pace; any other rank only reads, and no worker waits for it.

Operations return a Work at once; arrays given to them must be left alone until it is done. At most
one push, one pull and one peek of a key are under way: another one waits for the one before.

Threads: any.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.ps.client import arrays, session
from paceline.ps.client.key import Key, Operation, Receipt
from paceline.ps.client.remote_array import ArraySpec, RemoteArray, find, known_keys
from paceline.ps.client.subscription import Subscription
from paceline.ps.server.optimizer import optimizer_class
from paceline.ps.spec import OptimizerSpec, client_rule
from paceline.runtime.work import Work


class Client:
    """Pushes to and reads from the servers of this process's job.

    `pace` ("ps", "async", "ssp" or "ssp:3") and its options (`nonfinite="skip"`, ...) are the rule
    of the keys that this client makes.

    >>> client = pl.ps.Client("ssp:3", nonfinite="skip")
    """

    def __init__(self, pace: str = "async", **options: Any) -> None:
        self.rule = client_rule(pace, options)
        self._joined = session.current()
        self._mu = threading.Lock()
        self._started: list[Operation] = []  # not all over yet; guarded by: _mu

    # -- keys ---------------------------------------------------------------------------------

    def init(
        self,
        key: str,
        array: object,
        optimizer: str = "SGD",
        *,
        workers: Sequence[int] | None = None,
        **settings: Any,
    ) -> bool:
        """Make a key with this array as its first value, or join one that is there.

        The first rank's array counts, and it gets True. Everybody must name the same shape, dtype,
        optimizer (a class of torch.optim), settings (`lr=0.1`), pace and workers (default: all).
        Blocks until the key has its value.
        """
        with self._session.init_mu, _about(key):
            values = arrays.seen(array, f"rank {self._session.rank}: the array for key {key!r}")
            spec = self._spec(key, values, optimizer, workers, settings)
            known = self._session.keys.get(key)
            if known is not None and known.is_open:
                # "All" are others than before when workers have come or gone.
                there = known.spec if workers else replace(known.spec, workers=spec.workers)
                if there == spec:
                    return False
            remote = RemoteArray(self._session, spec)
            made = Key(self._session, remote, as_torch=isinstance(array, torch.Tensor))
            is_new = made.open(values)
            self._session.keys[key] = made
            return is_new

    def configure(self, key: str, **settings: Any) -> None:
        """Change settings of a key's optimizer (`lr=0.01`), from this rank's next push on."""
        found = self._key(key)
        found.configure(_plain(key, found.spec.optimizer.name, settings))

    def keys(self) -> list[str]:
        """Name all keys on the servers."""
        return known_keys(self._session)

    def version(self, key: str) -> int:
        """Return how many updates were applied to a key."""
        return min(self._key(key).remote.versions())

    def subscribe(self, key: str, after: int = -1) -> Subscription:
        """Follow the versions of a key above `after`; by default the present one comes first."""
        return Subscription(self._key(key).remote, after)

    # -- operations ---------------------------------------------------------------------------

    def push(self, key: str, grad: object) -> Work[Receipt]:
        """Hand over a gradient; done when the servers have applied it, once and for all."""
        return self._track(self._key(key).push(grad))

    def pull(self, key: str, out: object = None) -> Work[Any]:
        """Read a key when the pace lets this worker; into `out`, or a new array."""
        return self._track(self._key(key).pull(out))

    def push_pull(self, key: str, grad: object, out: object = None) -> Work[Any]:
        """Push, then pull, with one message each way; with pace `ps` all workers' mean counts."""
        return self._track(self._key(key).push_pull(grad, out))

    def peek(self, key: str, out: object = None) -> Work[Any]:
        """Read the newest values at once, whatever the pace; the clocks do not notice."""
        return self._track(self._key(key).peek(out))

    def wait(self, work: Work[Any] | None = None) -> Any:
        """Wait for a Work and return its result; None: for all that this client has started.

        Of several errors the first is raised, when all are over.
        """
        if work is not None:
            return work.wait()
        with self._mu:
            started, self._started = self._started, []
        errors = [operation.settled() for operation in started]
        for error in errors:
            if error is not None:
                raise error
        return None

    # -- plumbing -----------------------------------------------------------------------------

    @property
    def _session(self) -> session.ClientSession:
        if self._joined.is_over:
            raise UsageError("this client's job is over: paceline.shutdown() was called")
        return self._joined

    def _track(self, operation: Operation) -> Work[Any]:
        with self._mu:
            self._started = [one for one in self._started if not one.is_seen]
            self._started.append(operation)
        return operation.work()

    def _key(self, name: str) -> Key:
        known = self._session.keys.get(name)
        if known is None:
            remote = find(self._session, name)
            known = Key(self._session, remote, as_torch=False)
            known = self._session.keys.setdefault(name, known)
        return known

    def _spec(
        self,
        key: str,
        values: arrays.Array,
        optimizer: str,
        workers: Sequence[int] | None,
        settings: dict[str, Any],
    ) -> ArraySpec:
        if not isinstance(key, str) or not key:
            raise UsageError(f"a key is a text that is not empty (got {key!r:.60})")
        shape = arrays.shape_of(values)
        if 0 in shape:
            raise UsageError(f"key {key!r}: an array of shape {list(shape)} holds nothing to learn")
        chosen = OptimizerSpec(optimizer, (_plain(key, optimizer, settings),))
        spec = ArraySpec(
            key, shape, arrays.dtype_name(values), self._workers(key, workers), chosen, self.rule
        )
        return spec

    def _workers(self, key: str, workers: Sequence[int] | None) -> tuple[int, ...]:
        known = self._session.workers
        chosen = known if workers is None else tuple(sorted(set(workers)))
        if not chosen or not set(chosen) <= set(known):
            raise UsageError(
                f"key {key!r}: workers={list(workers or ())} must be ranks of this job"
                f" ({known[0]} to {known[-1]}), at least one"
            )
        return chosen


@contextlib.contextmanager
def _about(key: str) -> Iterator[None]:
    """Return the key in what is refused."""
    try:
        yield
    except UsageError as error:
        if repr(key) in str(error):
            raise
        raise type(error)(f"key {key!r}: {error}") from error


def _plain(key: str, optimizer: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's settings as plain values; UsageError for one that it does not have."""
    accepted = [
        n for n in inspect.signature(optimizer_class(optimizer)).parameters if n != "params"
    ]
    for name in settings:
        if name not in accepted:
            raise UsageError(
                f"key {key!r}: torch.optim.{optimizer} has no setting {name!r}; it has"
                f" {', '.join(accepted)}"
            )
    # A number of numpy or torch becomes one of Python; tuples are lists on the wire.
    plain = {n: v.item() if hasattr(v, "item") else v for n, v in settings.items()}
    rate = plain.get("lr", 0.0)
    if not isinstance(rate, int | float) or not rate >= 0:
        raise UsageError(f"key {key!r}: lr={rate!r:.40} must be a number >= 0")
    return {n: list(v) if isinstance(v, tuple) else v for n, v in plain.items()}
