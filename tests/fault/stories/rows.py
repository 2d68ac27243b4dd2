"""The fault matrix: for each row the fault, the expected result, and the tests that show it.

A test is named by file and function, or by the beginning of it: `test_row_01` means all tests
whose names begin so. `open_end` says what no test shows yet; it appears in the table.
"""

from __future__ import annotations

from dataclasses import dataclass

_STORIES = "tests/fault/stories"


@dataclass(frozen=True)
class Row:
    number: int
    fault: str
    follows: str
    tests: tuple[str, ...] = ()  # file::beginning of the name
    open_end: str = ""  # what is not shown, or not met


def _story(number: int, file: str) -> str:
    return f"{_STORIES}/test_story_{file}.py::test_row_{number:02}_"


ROWS = (
    Row(
        1,
        "SIGKILL of a worker, all-reduce",
        "survivors reduce the step again and commit it; a replacement joins from a peer",
        (
            _story(1, "processes"),
            "tests/fault/test_elastic_training.py::test_",
            "tests/multiprocess/test_run_elastic.py::test_a_killed_worker",
            "tests/multiprocess/test_elastic_data.py::test_each_sample_counts_once",
        ),
    ),
    Row(
        2,
        "the same over gloo or MPI",
        "a typed error",
        open_end="does not apply: Paceline has its own transport and does not train over these",
    ),
    Row(
        3,
        "SIGKILL of a worker, ps and ssp",
        "the barrier shrinks; the worker's incomplete step is dropped completely",
        (_story(3, "processes"), "tests/fault/test_ps_workers.py::test_the_others_go_on"),
    ),
    Row(
        4,
        "SIGKILL of a worker, async",
        "the other workers do not pause",
        (_story(4, "processes"),),
    ),
    Row(
        5,
        "SIGKILL of a server that has a backup",
        "the backup takes over, requests are repeated; nothing acknowledged is lost or doubled",
        (
            _story(5, "servers"),
            "tests/fault/test_ps_failover.py::test_a_backup_takes_over",
            "tests/fault/test_ps_failover.py::test_servers_are_killed_at_random",
            "tests/fault/test_ps_failover.py::test_the_primary_is_killed_at_every",
        ),
    ),
    Row(
        6,
        "SIGKILL of a backup",
        "training continues; a new backup catches up",
        (_story(6, "servers"), "tests/fault/test_ps_failover.py::test_a_backup_that_is_killed"),
    ),
    Row(
        7,
        "SIGKILL of all copies of some shards",
        "the job ends and names them",
        (_story(7, "servers"),),
        "if started again, the job resumes from its last checkpoint, if there is one",
    ),
    Row(
        8,
        "SIGKILL of the coordinator",
        "training continues; the coordinator restarts from its journal",
        (_story(8, "processes"), "tests/fault/test_coordinator_restart.py::test_"),
    ),
    Row(
        9,
        "SIGKILL of the launcher",
        "all processes end; a detached job continues and can be attached to again",
        (
            _story(9, "processes"),
            "tests/multiprocess/test_run_stop.py::test_nothing_survives_kill_9",
            "tests/multiprocess/test_run_stop.py::test_ranks_die_with_the_launcher",
        ),
    ),
    Row(
        10,
        "SIGKILL of everything at once",
        "nothing is left; the job can be started again",
        (_story(10, "processes"),),
        "the job resumes from its last checkpoint, if there is one",
    ),
    Row(
        11,
        "SIGSTOP of a worker, 3 s and forever",
        "3 s: the job waits; forever: evicted and killed, so it cannot write when it wakes up",
        (
            _story(11, "processes"),
            _story(11, "network"),
            "tests/fault/test_peers_come_and_go.py::test_a_stopped",
            "tests/multiprocess/test_run_elastic.py::test_a_stopped_worker",
        ),
    ),
    Row(
        12,
        "SIGSTOP of a primary server, then SIGCONT",
        "the backup takes over; the old primary cannot write",
        (_story(12, "servers"), "tests/fault/test_ps_failover.py::test_a_stopped_primary"),
    ),
    Row(
        13,
        "a worker holds the GIL forever",
        "it is reported as stuck, with its step and stacks, before it is evicted",
        (_story(13, "processes"),),
    ),
    Row(
        14,
        "partition: a host is cut off",
        "the majority continues, the minority commits nothing",
        (_story(14, "network"),),
    ),
    Row(
        15,
        "partition between the copies of a shard",
        "one side serves, the other is fenced",
        (_story(15, "network"),),
    ),
    Row(
        16,
        "one-way partition",
        "detected like a full partition",
        (_story(16, "network"),),
    ),
    Row(
        17,
        "links fail one by one and recover in a different order",
        "the job recovers",
        (_story(17, "network"),),
    ),
    Row(
        18,
        "a slow link; a worker with 1/10 of a core",
        "in lockstep the straggler is named; with async and ssp the others keep their speed",
        (_story(18, "resources"),),
    ),
    Row(
        19,
        "a peer that stops reading",
        "queues are bounded, the peer is dropped",
        ("tests/fault/test_ps_wire.py::test_a_worker_that_never_reads",),
    ),
    Row(
        20,
        "damaged frames",
        "detected by checksum, never applied",
        ("tests/fault/test_corruption.py::test_",),
    ),
    Row(
        21,
        "out of memory in a cgroup",
        "as after SIGKILL; the error names the limit and the cause",
        (
            _story(21, "resources"),
            "tests/multiprocess/test_run_failure.py::test_out_of_memory",
        ),
    ),
    Row(
        22,
        "ENOSPC, EIO and EDQUOT at the system calls of a save",
        "training continues, the save is reported as failed, older checkpoints remain",
        (
            "tests/fault/test_checkpoint_crashes.py::test_",
            "tests/multiprocess/test_checkpoint_faults.py::test_a_full_disk",
        ),
    ),
    Row(
        23,
        "SIGKILL at the system calls of a save",
        "the newest valid checkpoint loads",
        ("tests/fault/test_checkpoint_crashes.py::test_",),
    ),
    Row(
        24,
        "a byte of a checkpoint is flipped; a file is truncated, deleted, swapped or pickled",
        "refused with the file, the expected and the found hash; an older one is loaded",
        ("tests/fault/test_checkpoint_damage.py::test_",),
    ),
    Row(
        25,
        "SIGTERM of the launcher",
        "all processes end within the grace time; the second signal does not wait; a script with"
        " pl.Checkpoint saves after an agreed step and exits with code 75",
        (
            _story(25, "processes"),
            "tests/fault/test_elastic_training.py::test_a_signal_to_one_worker",
            "tests/multiprocess/test_run_stop.py::test_signals_end_everything",
            "tests/multiprocess/test_run_stop.py::test_the_second_ctrl_c",
            "tests/multiprocess/test_run_preemption.py::test_",
        ),
    ),
    Row(
        26,
        "no memory for a segment",
        "SharedMemoryError with sizes on all ranks, never SIGBUS",
        ("tests/fault/test_memory.py::test_",),
        "it does not fall back to TCP on one host",
    ),
    Row(
        27,
        "repeated kills while attached to shared memory",
        "no process, segment, descriptor, port or file leaks",
        (
            "tests/fault/test_leaks.py::test_",
            "tests/fault/test_ps_leaks.py::test_",
            "tests/fault/test_peers_come_and_go.py::test_neighbours_come_and_go",
            _story(27, "resources"),
        ),
    ),
    Row(
        29,
        "NaN on one worker",
        "one decision on all workers; it names worker, step and tensor",
        (
            "tests/fault/test_ps_bad_input.py::test_a_nan",
            "tests/multiprocess/test_client_bad_input.py::test_a_push_that_is_not_finite",
            _story(29, "numbers"),
        ),
    ),
    Row(
        30,
        "a flipped bit in one replica's parameters",
        "the consistency check detects it and names the worker",
        (
            "tests/multiprocess/test_consistency.py::test_",
            _story(30, "numbers"),
        ),
        "only when the script calls pl.check_consistency; there is no automatic check",
    ),
    Row(
        31,
        "a different collective on one worker",
        "CollectiveMismatch on all workers, with ranks and operations; no hang",
        ("tests/fault/test_mismatch.py::test_",),
    ),
    Row(
        32,
        "wall clocks an hour off, and changed during the run",
        "no effect",
        (_story(32, "numbers"),),
    ),
    Row(
        33,
        "4 x as many processes as cores, without a fault",
        "no process is evicted",
        (_story(33, "resources"),),
    ),
    Row(
        34,
        "2, 6, 1, 4 workers during training",
        "every step once, the same parameters on all workers, every sample equally often",
        (
            _story(34, "scale"),
            "tests/fault/test_ps_failover.py::test_servers_are_added_and_removed",
            "tests/multiprocess/test_elastic_data.py::test_random_kills_and_joins",
        ),
    ),
    Row(
        35,
        "no descriptors or processes left",
        "a clear error, no partial job",
        (
            "tests/fault/test_memory.py::test_a_rank_that_cannot_join",
            "tests/multiprocess/test_run_elastic.py::test_without_descriptors",
            _story(35, "resources"),
        ),
    ),
    Row(
        37,
        "random kills of any process",
        "training converges; nothing acknowledged is lost",
        (_story(37, "chaos"),),
        "efficiency and loss at given failure rates are measured by bench/chaos",
    ),
    Row(
        38,
        "no fault",
        "overhead of fault tolerance",
        open_end="measured by bench/chaos, see docs/log.md",
    ),
)
