"""The choice of pace=auto and --max-wire: policy, budget, hysteresis, and when to plan again."""

from __future__ import annotations

import msgspec
import pytest

from paceline.errors import UsageError
from paceline.pace.parse import parse, parse_schedule
from paceline.planner.automatic.budget import lighter, wire_bytes_per_s
from paceline.planner.automatic.decision import (
    CURRENT_BONUS,
    INEXACT_GAIN,
    Situation,
    choose,
    straggler_among,
    weight,
)
from paceline.planner.automatic.policy import (
    Servers,
    allowed_candidates,
    make_candidate,
    require_planned,
)
from paceline.planner.automatic.watch import (
    LinkFound,
    WatchState,
    after_window,
    describe_change,
)
from paceline.planner.cluster import even_cluster
from paceline.planner.profile import BucketProfile, ModelProfile
from paceline.planner.quantities import Link

PLAIN = make_candidate("allreduce", Servers())
PROFILE = ModelProfile(
    name="m",
    batch=32,
    forward_s=0.02,
    backward_s=0.04,
    optimizer_s=0.005,
    input_s=0.0,
    buckets=(BucketProfile(10_000_000, 0.02), BucketProfile(10_000_000, 0.04)),
    steps=5,
)


def situation(mbit: float, hosts: int = 2, **more: float) -> Situation:
    cluster = even_cluster(hosts, Link(mbit * 1e6 / 8, 50e-6))
    return Situation(PROFILE, cluster, **more)  # type: ignore[arg-type]


def names(allow: str, servers: Servers, hosts: int, *, budget: bool = False) -> set[str]:
    found = allowed_candidates(allow, servers, hosts, has_budget=budget)
    return {str(one.pace) for one in found}


def test_the_policy_allows_nothing_that_was_not_allowed():
    none, two = Servers(), Servers(2)
    assert names("exact", none, 2) == {"allreduce"}
    assert names("exact", two, 2) == {"allreduce", "ps"}
    codecs = {"allreduce", "allreduce[compress=bf16]", "allreduce[compress=int8]"}
    assert names("codecs", none, 2) == codecs
    assert names("codecs", none, 1) == {"allreduce"}, "within a host nothing is sent"
    assert names("stale", none, 2) == codecs, "without servers no worker can be stale"
    assert {"ssp:3", "async"} <= names("stale", two, 2)
    assert not {"local:8", "diloco:50"} & names("stale", two, 2)
    assert {"local:8", "diloco:50"} <= names("local", none, 1)
    assert {"ssp:3", "local:8"} <= names("stale+local", two, 2)
    assert "allreduce[compress=topk:0.01+int8]" in names("codecs", none, 2, budget=True)
    assert names("exact", none, 2, budget=True) == {"allreduce"}


def test_fast_links_keep_what_is_exact_and_slow_ones_do_not():
    allowed = allowed_candidates("codecs", Servers(), 2, has_budget=False)
    fast = choose(PLAIN, allowed, situation(10_000), current="allreduce")
    assert fast.pace == "allreduce" and "exact: equals" in fast.lines()[1]
    slow = choose(PLAIN, allowed, situation(100), current="allreduce")
    assert slow.pace == "allreduce[compress=int8]"
    first, second = slow.lines("the link changed, so")
    assert first.startswith("the link changed, so: allreduce[compress=int8]: predicted ")
    assert ", allreduce " in first and "sends 1/3.88 of allreduce" in first
    assert "changes the training: loss within 2 sd" in second


def test_the_current_pace_stays_until_another_one_is_better_by_much():
    allowed = allowed_candidates("codecs", Servers(), 2, has_budget=False)
    exact, int8 = "allreduce", "allreduce[compress=int8]"
    between = []
    for mbit in range(200, 6000, 50):
        here = situation(float(mbit))
        up = choose(PLAIN, allowed, here, current=exact).pace
        down = choose(PLAIN, allowed, here, current=int8).pace
        if up == exact and down == int8:
            between.append(mbit)
    assert between, "links between the two borders leave any pace as it is"
    # The same link never moves a job from one to the other and back.
    for mbit in range(100, 6000, 100):
        pace, here = exact, situation(float(mbit))
        seen = []
        for _ in range(4):
            pace = choose(PLAIN, allowed, here, current=pace).pace
            seen.append(pace)
        assert len(set(seen)) == 1, (mbit, seen)
    one = situation(1000).predict(make_candidate(int8, Servers()))
    assert weight(one, "") == pytest.approx(one.samples_per_s / INEXACT_GAIN)
    assert weight(one, int8) == pytest.approx(weight(one, "") * CURRENT_BONUS)


def fitted(text: str, budget: float, current: str = "", factor: float = 1.0) -> str:
    """Return the variant of a pace that is chosen for a budget, in bytes per second."""
    variants = [make_candidate(str(one), Servers()) for one in lighter(parse(text))]
    found = choose(
        PLAIN,
        variants,
        situation(10_000),
        current=current,
        max_wire=budget,
        wire_factor=factor,
        in_order=True,
    )
    assert wire_bytes_per_s(found.prediction) * factor <= budget
    return found.pace


def sent(text: str) -> float:
    return wire_bytes_per_s(situation(10_000).predict(make_candidate(text, Servers())))


@pytest.mark.parametrize(
    ("given", "codecs", "blocks"),
    [
        ("allreduce", ["bf16", "int8", "int4", "topk:0.01+int8"], []),
        ("allreduce[compress=int8]", ["int4", "topk:0.01+int8"], []),
        ("local:4", ["bf16", "int8"], ["local:8", "local:16", "local:32"]),
        ("diloco:50[compress=int8]", [], ["diloco:100", "diloco:200", "diloco:400"]),
    ],
)
def test_a_budget_takes_the_mildest_variant_that_fits(given, codecs, blocks):
    name = given.partition("[")[0]
    ladder = [given, *(f"{name}[compress={one}]" for one in codecs)]
    ladder += [f"{one}[compress=int8]" for one in blocks]
    assert [str(one) for one in lighter(parse(given))] == ladder
    for text in ladder:
        assert fitted(given, sent(text) * 1.001) == text
    with pytest.raises(UsageError, match=r"--max-wire .*: no pace sends so little; .* closest"):
        fitted(given, sent(ladder[-1]) * 0.9)


def test_the_variant_of_a_budget_does_not_flap():
    bf16 = "allreduce[compress=bf16]"
    plain = sent("allreduce")
    assert fitted("allreduce", plain * 1.1) == "allreduce"
    assert fitted("allreduce", plain * 1.1, current=bf16) == bf16, "a milder one needs a margin"
    assert fitted("allreduce", plain * 1.2, current=bf16) == "allreduce"
    # More is sent than predicted: what fitted does not fit any more.
    assert fitted("allreduce", sent(bf16) * 1.1, current=bf16, factor=1.5) != bf16


def test_memory_and_what_a_job_cannot_run_leave_a_choice_or_an_error():
    allowed = allowed_candidates("local", Servers(), 2, has_budget=False)
    rich = choose(PLAIN, allowed, situation(10))
    assert rich.pace.startswith("diloco")
    poor = choose(PLAIN, allowed, situation(10, free_bytes=30e6))
    assert poor.pace.startswith("local"), "a copy of the parameters fits, three do not"
    with pytest.raises(UsageError, match="can run none of the paces"):
        choose(PLAIN, [], situation(10))
    with pytest.raises(UsageError, match="pace gossip:ring cannot be planned.*leave out"):
        require_planned(parse("gossip:ring"))


def test_a_worker_that_is_always_slow_is_noticed():
    assert straggler_among([1.0, 1.1, 1.2]).workers == 0
    assert straggler_among([1.0, 1.0, 3.0]) == (3.0, 0.0, 1)
    assert straggler_among([1.0]).workers == 0


STATE = WatchState(
    version=1, pace="allreduce", placement={"a": 1, "b": 1}, links=(LinkFound("a", "b", 1e8, 1e-4),)
)


def test_links_are_measured_again_for_a_reason():
    same = {"a": 1, "b": 1}
    state, why = after_window(STATE, same, 0.1, 2.5)
    assert (why, state.usual_s, state.version) == ("", 0.1, 2)
    state, why = after_window(state, same, 0.4, 10.0)
    assert (why, state.odd_meetings) == ("", 1), "once may be chance"
    calm, why = after_window(state, same, 0.1, 2.5)
    assert (why, calm.odd_meetings) == ("", 0)
    assert after_window(state, same, 0.4, 10.0)[1] == "steps"
    assert after_window(state, {"a": 2, "b": 1}, 0.1, 2.5)[1] == "hosts"
    probed = msgspec.structs.replace(STATE, probe_s=1.0, since_probe_s=50.0)
    assert after_window(probed, same, 0.1, 40.0)[1] == ""
    assert after_window(probed, same, 0.1, 60.0)[1] == "time", "1 % of the time"
    alone = msgspec.structs.replace(STATE, placement={"a": 2}, usual_s=0.1, odd_meetings=5)
    assert after_window(alone, {"a": 2}, 0.9, 9.0)[1] == "", "one host has no links"


def test_only_large_changes_are_a_reason_to_choose_again():
    same = {"a": 1, "b": 1}
    assert describe_change(STATE, same, [LinkFound("a", "b", 0.6e8, 1e-4)]) == ""
    slower = describe_change(STATE, same, [LinkFound("a", "b", 1e7, 1e-4)])
    assert slower == "the link between a and b has 80mbit instead of 800mbit"
    fewer = describe_change(STATE, {"a": 1}, [])
    assert fewer == "1 workers on 1 host instead of 2 on 2 hosts"


def test_each_change_makes_the_next_one_wait_longer():
    assert STATE.may_change(1)
    waits = []
    for changes in range(1, 10):
        state = msgspec.structs.replace(STATE, changes=changes, changed_at=1000)
        waits.append(next(s for s in range(1000, 9000) if state.may_change(s)) - 1000)
    assert waits == [50, 100, 200, 400, 800, 1600, 3200, 3200, 3200]


def test_auto_is_a_word_with_one_option_and_stands_alone():
    assert str(parse("auto[allow=stale+local]")) == "auto[allow=stale+local]"
    assert parse_schedule("auto").first.is_auto and not parse("allreduce").is_auto
    with pytest.raises(UsageError, match=r"allow='lokal' \(did you mean local\?\)"):
        parse("auto[allow=lokal]")
    for text in ("auto, ps@100", "allreduce@0, auto@50"):
        with pytest.raises(UsageError, match="auto chooses the pace at any step; give it alone"):
            parse_schedule(text)
