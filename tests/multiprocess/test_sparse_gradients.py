"""Averages of sparse gradients against the dense ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.comm.group import Group
from paceline.data_parallel.sparse import SparseGradients
from paceline.errors import InconsistentRanks, UsageError
from support import run_ranks
from support.reference import bits

ROWS, COLUMNS = 7, 3


def gradient(rank: int, num_entries: int, dtype: torch.dtype, sparse_dims: int = 1) -> torch.Tensor:
    """Entries with repeated indices; small whole numbers, whose sums are exact in every dtype."""
    random = torch.Generator().manual_seed(100 * rank + num_entries)
    shape = (ROWS, COLUMNS, 2)
    indices = torch.stack(
        [torch.randint(0, size, (num_entries,), generator=random) for size in shape[:sparse_dims]]
    )
    values = torch.randint(-4, 5, (num_entries, *shape[sparse_dims:]), generator=random).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


# -- in the ranks ---------------------------------------------------------------------------------


def check_average(group: Group, mine: torch.Tensor, everybodys: list[torch.Tensor]) -> None:
    found = SparseGradients(group).average(mine)
    total = sum(grad.to_dense().double() for grad in everybodys)
    expected = (total / group.size).to(mine.dtype)
    assert found.is_coalesced() and found.dtype == mine.dtype and found.shape == mine.shape
    assert found.sparse_dim() == mine.sparse_dim()
    assert torch.equal(found.to_dense(), expected)
    touched = torch.cat([grad._indices() for grad in everybodys], dim=1).unique(dim=1)
    assert torch.equal(found.indices(), touched)
    for other in group.all_gather(found.values()):
        assert bits(other) == bits(found.values())


def all_kinds(group: Group) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for sparse_dims in (1, 2, 3):
            for sizes in ([5, 9, 2, 4], [0, 6, 0, 1], [0, 0, 0, 0]):
                grads = [gradient(r, sizes[r], dtype, sparse_dims) for r in range(group.size)]
                mine = grads[group.rank]
                check_average(group, mine, grads)
                check_average(group, mine.coalesce(), grads)


def rounded_once(group: Group) -> None:
    """256 + 1 + 1 is 258 in bfloat16, but not if each addition is rounded."""
    value = [256.0, 1.0, 1.0][group.rank]
    mine = torch.sparse_coo_tensor(
        [[0]], torch.tensor([value], dtype=torch.bfloat16), (1,), check_invariants=True
    )
    found = SparseGradients(group).average(mine)
    assert found.values().tolist() == [86.0]


def of_an_embedding(group: Group) -> None:
    torch.manual_seed(0)
    words = torch.randint(0, 10, (group.size, 6))
    sparse, dense = nn.Embedding(10, 4, sparse=True), nn.Embedding(10, 4)
    dense.load_state_dict(sparse.state_dict())
    sparse(words[group.rank]).pow(2).sum().backward()
    dense(words).pow(2).sum().backward()
    sparse.weight.grad = SparseGradients(group).average(sparse.weight.grad)
    torch.testing.assert_close(sparse.weight.grad.to_dense() * group.size, dense.weight.grad)
    torch.optim.SparseAdam(sparse.parameters()).step()


def disagreements(group: Group) -> list[str]:
    sparse = SparseGradients(group)
    narrow, wide = gradient(0, 3, torch.float32), gradient(0, 3, torch.float64)
    told = []
    for odd in (wide, gradient(0, 3, torch.float32, 2), narrow.to_dense()):
        with pytest.raises(InconsistentRanks) as caught:
            sparse.average(odd if group.rank == 1 else narrow)
        assert caught.value.sides == ((0,), (1,))
        told.append(str(caught.value))
    with pytest.raises(UsageError, match="averages sparse gradients, but got strided float32"):
        sparse.average(narrow.to_dense())
    return told


# -- in the test session --------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "hosts"), [(1, 1), (2, 1), (4, 2)])
def test_equals_the_dense_average(world_size, hosts):
    def body(group):
        all_kinds(group)
        of_an_embedding(group)

    run_ranks(world_size, body, hosts=hosts)


def test_half_precision_is_rounded_once():
    run_ranks(3, rounded_once)


def test_ranks_that_disagree_all_hear_how():
    told = run_ranks(2, disagreements)
    dtype, dims, layout = told[1]
    assert dtype.startswith("rank 1 averages a sparse gradient whose kind differs")
    assert "sparse float32[7, 3, 2] with 1 sparse dimensions on rank 0" in dtype
    assert "sparse float64[7, 3, 2] with 1 sparse dimensions on rank 1" in dtype
    assert "with 2 sparse dimensions on rank 1" in dims
    assert "strided float32[7, 3, 2] on rank 1" in layout
