"""paceline.keras.shard: this worker's part of the data, of the same number of batches everywhere.

A worker gets every n-th sample (arrays, datasets) or batch (PyDataset). What is left over when the
data cannot be divided evenly is dropped, as `drop_last` does; `fit` also accepts uneven parts.
"""

from __future__ import annotations

import sys
from typing import Any

from paceline.errors import UsageError
from paceline.runtime.job import data_rank, data_world_size


def shard(*data: Any) -> Any:
    """Return this worker's part of the data: a tuple for several arguments, else one value.

    Arrays of numpy, TensorFlow, torch or JAX (also nested in dicts, lists and tuples) are cut by
    their first dimension, a tf.data.Dataset by its elements, a keras.utils.PyDataset by its
    batches, a torch DataLoader by the samples of its dataset.

    >>> model.fit(*paceline.keras.shard(x, y))
    >>> model.fit(paceline.keras.shard(dataset))
    """
    if not data:
        raise UsageError("paceline.keras.shard(): pass arrays, a dataset or a loader")
    index, count = data_rank(), data_world_size()
    sizes = {len(leaf) for one in data for leaf in _leaves(one) if hasattr(leaf, "shape")}
    if len(sizes) > 1:
        raise UsageError(
            f"paceline.keras.shard: the arrays have {sorted(sizes)} samples; they must have the"
            " same number"
        )
    parts = tuple(_part(one, index, count) for one in data)
    return parts if len(parts) > 1 else parts[0]


def _leaves(data: Any) -> list[Any]:
    if isinstance(data, dict):
        return [leaf for value in data.values() for leaf in _leaves(value)]
    if isinstance(data, list | tuple):
        return [leaf for value in data for leaf in _leaves(value)]
    return [data]


def _part(data: Any, index: int, count: int) -> Any:
    if data is None:
        return None
    if isinstance(data, dict):
        return {name: _part(value, index, count) for name, value in data.items()}
    if isinstance(data, list | tuple) and all(hasattr(leaf, "shape") for leaf in _leaves(data)):
        return type(data)(_part(value, index, count) for value in data)
    if hasattr(data, "shape") and hasattr(data, "__getitem__"):
        even = len(data) // count * count
        return data[index:even:count]
    for is_kind, cut in ((_is_tf_dataset, _tf_part), (_is_py_dataset, _py_part)):
        if is_kind(data):
            return cut(data, index, count)
    if _is_loader(data):
        return _loader_part(data, index, count)
    raise UsageError(
        f"paceline.keras.shard: cannot divide a {type(data).__name__}; pass arrays, a"
        " tf.data.Dataset, a keras.utils.PyDataset or a torch DataLoader. A generator must yield"
        " this worker's batches itself (paceline.data_rank(), paceline.data_world_size())"
    )


def _is_tf_dataset(data: Any) -> bool:
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(data, tf.data.Dataset)


def _tf_part(data: Any, index: int, count: int) -> Any:
    size = int(data.cardinality())
    even = data.take(size // count * count) if size > 0 else data  # negative: not known
    return even.shard(count, index)


def _is_py_dataset(data: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(data, keras.utils.PyDataset)


def _py_part(data: Any, index: int, count: int) -> Any:
    import keras

    class Part(keras.utils.PyDataset):  # type: ignore[misc]
        """Every n-th batch of a PyDataset."""

        def __init__(self) -> None:
            super().__init__(data.workers, data.use_multiprocessing, data.max_queue_size)

        def __len__(self) -> int:
            return int(data.num_batches) // count

        def __getitem__(self, number: int) -> Any:
            return data[number * count + index]

        def on_epoch_begin(self) -> None:
            data.on_epoch_begin()

        def on_epoch_end(self) -> None:
            data.on_epoch_end()

    return Part()


def _is_loader(data: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.utils.data.DataLoader)


def _loader_part(data: Any, index: int, count: int) -> Any:
    from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset

    if isinstance(data.dataset, IterableDataset) or data.batch_size is None:
        raise UsageError(
            "paceline.keras.shard: this DataLoader has no number of samples; let its dataset yield"
            " this worker's samples (paceline.data_rank(), paceline.data_world_size())"
        )
    size = len(data.dataset)
    return DataLoader(
        Subset(data.dataset, range(index, size // count * count, count)),
        batch_size=data.batch_size,
        shuffle=isinstance(data.sampler, RandomSampler),
        num_workers=data.num_workers,
        collate_fn=data.collate_fn,
        drop_last=data.drop_last,
        pin_memory=data.pin_memory,
        timeout=data.timeout,
        worker_init_fn=data.worker_init_fn,
        generator=data.generator,
    )
