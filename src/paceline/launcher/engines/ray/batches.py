"""Batches of a `ray.data` dataset for `pl.shard`: every batch has a number, and workers ask by it.

`pl.ray.batches` puts the batches into Ray's object store, in the order of the dataset; an actor
keeps them. A worker connects to Ray when it takes its first batch, and reads only those that are
its own, so with mode="dynamic" a faster worker takes more of them.
"""

from __future__ import annotations

from typing import Any

from paceline.errors import UsageError
from paceline.launcher.engines.ray.connection import import_ray


class BatchKeeper:
    """The actor that keeps references to all batches of a dataset, and so the batches."""

    def __init__(self, dataset: Any, batch_size: int) -> None:
        import ray

        self._references = [
            ray.put(batch)
            for batch in dataset.iter_batches(batch_size=batch_size, batch_format="numpy")
        ]

    def count(self) -> int:
        """Return the number of batches."""
        return len(self._references)

    def batch(self, index: int) -> Any:
        """Return a batch, which Ray takes from its object store."""
        import ray

        return ray.get(self._references[index])


class RayBatches:
    """A map-style dataset of batches: dictionaries of columns, as tensors."""

    def __init__(self, actor: str, namespace: str, address: str, count: int) -> None:
        self._actor, self._namespace, self._address = actor, namespace, address
        self._count = count
        self._keeper: Any = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        ray = import_ray()
        if self._keeper is None:
            if not ray.is_initialized():
                ray.init(address=self._address, log_to_driver=False, logging_level="ERROR")
            self._keeper = ray.get_actor(self._actor, self._namespace)
        columns = ray.get(self._keeper.batch.remote(index))
        return {name: torch.as_tensor(values.copy()) for name, values in columns.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_keeper": None}


def batches(dataset: Any, batch_size: int) -> RayBatches:
    """Return the batches of a ray.data dataset as a dataset for `DataLoader(batch_size=None)`.

    Call it in the process that calls `pl.ray.run`, and give the result to the function. The batches
    are kept until this process ends its connection to Ray.

    >>> data = pl.ray.batches(ray.data.range(1000), batch_size=32)  # doctest: +SKIP
    >>> pl.shard(DataLoader(data, batch_size=None), mode="dynamic")  # doctest: +SKIP
    """
    ray = import_ray()
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"pl.ray.batches(batch_size={batch_size!r}): expected 1 or more")
    if not ray.is_initialized():
        ray.init(address="auto")
    context = ray.get_runtime_context()
    name = f"paceline-batches-{context.get_job_id()}-{id(dataset)}"
    keeper = ray.remote(num_cpus=0)(BatchKeeper).options(name=name).remote(dataset, batch_size)
    made = RayBatches(name, context.namespace, context.gcs_address, ray.get(keeper.count.remote()))
    made._keeper = keeper
    return made
