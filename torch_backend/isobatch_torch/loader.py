"""A DataLoader that loads the rows of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, default_collate

from isobatch.clusters import Cluster, emptied

__all__ = ["data_loader"]


def data_loader(
    dataset: Any,
    batch_size: int,
    cluster: Cluster,
    *,
    shuffle: bool = False,
    seed: int = 0,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    **options: Any,
) -> DataLoader[Any]:
    """Return a `DataLoader` of this process's rows of each whole batch; it reads no other rows.

    Every process takes as many steps; where the last batch has fewer rows than there are processes, some get an empty one.

    Args:
        dataset: With a length, read by number; the same in every process.
        batch_size: Rows of a whole batch.
        cluster: Who shares the rows.
        shuffle: Whether to deal the rows in another order in each epoch.
        seed: Of that order. To resume, set `loader.batch_sampler.epoch`.
        collate_fn: As for `DataLoader`.
        options: What else `DataLoader` takes.

    >>> loader = data_loader(range(5), 4, Cluster(1, 2))
    >>> [batch.tolist() for batch in loader]
    [[2, 3], []]
    """
    rows = cluster.batches(len(dataset), batch_size, shuffle=shuffle, seed=seed)
    return DataLoader(dataset, batch_sampler=rows, collate_fn=_Collate(dataset, collate_fn), **options)


@dataclass(frozen=True, slots=True)
class _Collate:
    """Makes a batch of rows, an empty one of none."""

    dataset: Any
    collate: Callable[[list[Any]], Any]

    def __call__(self, rows: Sequence[Any]) -> Any:
        return self.collate(list(rows)) if rows else emptied(self.collate([self.dataset[0]]))
