"""Meshes: what a string means, who is where, and what is refused."""

from __future__ import annotations

import pytest

from paceline.errors import UsageError
from paceline.runtime.mesh import Mesh


def test_units_are_ranges_and_columns_go_across_them():
    mesh = Mesh.parse("tp=2, dp=2,pp=2")
    assert str(mesh) == "dp=2,pp=2,tp=2" and mesh.num_workers == 8
    assert mesh.inner == (("pp", 2), ("tp", 2))
    assert list(mesh.unit(5)) == [4, 5, 6, 7] and list(mesh.data_parallel_numbers(5)) == [1, 5]
    assert [mesh.index(5, axis) for axis in ("dp", "pp", "tp")] == [1, 0, 1]


@pytest.mark.parametrize("text", ["dp=2,tp=2", "dp=2,fsdp=2,tp=2", "dp=2,pp=2,tp=2", "fsdp=4"])
def test_everybody_shares_data_with_one_of_every_pipeline_or_tensor_group(text):
    mesh = Mesh.parse(text)
    for number in range(mesh.num_workers):
        sharers = mesh.batch_numbers(number)
        assert number in sharers and len(sharers) == mesh.dp * mesh.fsdp
        assert len({(mesh.index(n, "dp"), mesh.index(n, "fsdp")) for n in sharers}) == len(sharers)
        assert {(mesh.index(n, "pp"), mesh.index(n, "tp")) for n in sharers} == {
            (mesh.index(number, "pp"), mesh.index(number, "tp"))
        }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not an axis"),
        ("dp", "'dp' is not an axis"),
        ("xp=2", "'xp=2' is not an axis"),
        ("dp=two", "not an axis"),
        ("dp=-1", "not an axis"),
        ("dp=0", "at least 1"),
        ("dp=2,dp=2", "dp is given twice"),
        ("pp=2,fsdp=2", "pp and fsdp cannot be combined"),
    ],
)
def test_what_is_no_mesh_is_refused(text, words):
    with pytest.raises(UsageError, match=words):
        Mesh.parse(text)


def test_another_number_of_workers_is_refused_with_the_arithmetic():
    with pytest.raises(UsageError, match="dp 2 x tp 2 = 4, but this job has 3 workers"):
        Mesh.parse("dp=2,tp=2").require(3)


def test_workers_that_are_left_hold_fewer_copies():
    assert Mesh.parse("dp=2,tp=2").of_workers(2) == Mesh(tp=2)
