"""Profiles, cluster files and quantities: what they mean, and what is refused."""

from __future__ import annotations

import json

import pytest

from paceline.errors import ConfigError
from paceline.planner.cluster import read_cluster
from paceline.planner.profile import read_profile, write_profile
from paceline.planner.quantities import Link, Straggler, parse_link, parse_straggler, parse_time


def test_quantities():
    assert parse_link("25gbit,50us") == pytest.approx(Link(3.125e9, 50e-6))
    assert parse_link("100mbit").text == "100mbit,50us"
    assert (parse_time("6h"), parse_time("1.5ms")) == (21600.0, 0.0015)
    assert parse_straggler("3x2%") == Straggler(3.0, 0.02)
    assert parse_straggler("4x1") == Straggler(4.0, 0.0, 1)
    assert [parse_straggler(text).text for text in ("3x2%", "4x1")] == ["3x2%", "4x1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0gbit", "nothing can be sent"),
        ("25", "a number and a unit"),
        ("25gbit,5parsec", "a number and a unit"),
        ("1e999gbit", "not finite"),
    ],
)
def test_links_that_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_link(text)


@pytest.mark.parametrize("text", ["3", "0.5x2%", "3x200%", "3x1.5", "x"])
def test_stragglers_that_are_refused(text):
    with pytest.raises(ConfigError, match="FACTORxSHARE%"):
        parse_straggler(text)


def test_a_profile_of_three_fields_and_its_file(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"parameters_bytes": 60e6, "compute_s": 0.3, "batch": 4}))
    profile = read_profile(path)
    assert [bucket.num_bytes for bucket in profile.buckets] == [20_000_000] * 3
    assert profile.compute_s == pytest.approx(0.3)
    assert profile.buckets[-1].ready_s == pytest.approx(profile.backward_s)
    write_profile(profile, path)
    assert read_profile(path) == profile


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"compute_s": 1.0}, "parameters_bytes or buckets"),
        ({"parameters_bytes": 1e6}, "needs compute_s"),
        ({"parameters_bytes": 1e6, "compute_s": 0}, "compute_s"),
        ({"parameters_bytes": 1e6, "compute_s": 1, "speed": 3}, "unknown field `speed`"),
        ({"parameters_bytes": 1e6, "compute_s": 1, "optimizer": "Lion"}, "give state_factor"),
        ({"parameters_bytes": 1e6, "compute_s": 1, "input_s": 2}, "input_s and optimizer_s alone"),
        ({"forward_s": 0, "backward_s": 0, "parameters_bytes": 1}, "computes nothing"),
    ],
)
def test_profiles_that_are_refused(tmp_path, fields, words):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=words):
        read_profile(path)


def test_a_missing_profile_says_what_writes_one(tmp_path):
    with pytest.raises(ConfigError, match="--save-profile"):
        read_profile(tmp_path / "none.json")


CLUSTER = """
hosts:
  - {name: a, cores: 16, memory: 64gb, workers: 4}
  - {name: b, cores: 8, memory: 32gb, workers: 4, speed: 0.5}
  - {name: spare, cores: 8, workers: 0}
link: 25gbit,50us
links: {a-b: "10gbit,80us"}
"""


def test_a_cluster_file(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    cluster = read_cluster(path)
    assert (cluster.num_workers, cluster.num_hosts, cluster.server_hosts) == (8, 2, 1)
    assert cluster.between("b", "a") == cluster.slowest_link()
    assert cluster.slowest_link() == pytest.approx(Link(1.25e9, 80e-6))
    assert cluster.hosts[1].memory_bytes == 32 * 10**9


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("cores: 16", "kores: 16", "unknown field `kores`"),
        ("link: 25gbit,50us", "link: 0gbit,50us", "nothing can be sent at that rate"),
        ("a-b", "a-c", "not HOST-HOST of two listed hosts"),
        ("name: b", "name: a", "listed twice"),
        ("hosts:", "host:", "missing required field `hosts`|unknown field `host`"),
        ("workers: 4", "workers: 0", "no host has workers"),
        ("{name: a", "{{name: a", "not YAML"),
        ("memory: 64gb", "memory: much", "memory of host a"),
    ],
)
def test_cluster_files_that_are_refused(tmp_path, before, after, words):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER.replace(before, after))
    with pytest.raises(ConfigError, match=words):
        read_cluster(path)
