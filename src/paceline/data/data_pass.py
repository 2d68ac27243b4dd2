"""DataPass: one pass over one loader; and the agreement between ranks before it begins.

In lockstep the k-th global batch is split among the current workers. At a free-running pace no
worker waits for another, so nothing is split again: the data is divided by number among as many
workers as the job was started with, and a worker that takes over a number continues at its steps.

Before the first batch all ranks check that they passed the same loader. If one rank finds a
problem, all ranks raise it, so that none waits for a rank that has given up. The data has a group
of its own: its collectives never interleave with those of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from paceline.comm.group import Group
from paceline.comm.object_collectives import all_gather_object, raise_first_problem
from paceline.data.cursor.cursor import Cursor, Facts
from paceline.data.cursor.loader_state import LoaderState
from paceline.data.cursor.progress import DataProgress
from paceline.data.randomness import Seeds, save_random_state, with_random_state
from paceline.data.sources.loaders import LoaderRecord
from paceline.data.sources.samples import samples_in
from paceline.data.split.order import LocalOrder, SamplerOrder
from paceline.data.split.plan import BatchPlan
from paceline.errors import DataError, UsageError, named
from paceline.runtime.batch_weight import Announcer
from paceline.runtime.job import Job

_LENGTHS = ("the length of the dataset", "the length of the sampler", "the number of batches")


@dataclass(frozen=True)
class DataPass:
    """The context of one pass. In a job that is not elastic the workers do not change."""

    job: Job  # of the workers that have batches of their own
    group: Group  # of the data
    progress: DataProgress
    loader: LoaderState
    record: LoaderRecord
    announcer: Announcer
    log_once: Callable[[str], None]  # per loader
    facts: Facts  # what the ranks agreed on about the loader
    epoch: int
    seed: int
    lookahead: int  # batches that any worker's loader may request ahead of time
    pad: bool
    resize: str

    @property
    def is_elastic(self) -> bool:
        """Whether workers may join and leave."""
        return self.job.elastic.is_on

    @property
    def is_free_running(self) -> bool:
        """Whether no worker waits for another."""
        return not self.job.elastic.is_lockstep

    @property
    def nominal(self) -> int:
        """How many workers the job was started with."""
        return self.job.env.world_size

    @property
    def members(self) -> tuple[int, ...]:
        """The workers that share the data: ranks, or numbers at a free-running pace."""
        if self.is_free_running:
            return tuple(range(self.nominal))
        return self.job.fabric.membership.workers

    @property
    def member(self) -> int:
        """This worker's entry in `members`."""
        return self.job.env.number % self.nominal if self.is_free_running else self.job.env.rank

    @property
    def script_seeds(self) -> Seeds | None:
        """Seeds by batch for what the script computes, if a replacement must draw the same."""
        return self.dataset_seeds if self.job.env.on_loss == "replace" else None

    @property
    def dataset_seeds(self) -> Seeds:
        """Seeds by batch for the dataset."""
        return Seeds(self.seed, self.job.data_number, self.epoch)

    def order(self, plan: BatchPlan, group: Group | None) -> LocalOrder | SamplerOrder:
        """Return the order of a loader with indices. The user's own sampler is broadcast in
        `group`; without a group each worker iterates its own."""
        if plan.sampler is None:
            return plan.local_order(self.seed, self.epoch)
        return SamplerOrder(group, plan.sampler, self.run_collective)

    # -- progress -----------------------------------------------------------------------------

    def open(self, cursor: Cursor) -> None:
        """Begin the pass, or enter it where the other workers are."""
        cursor.index, cursor.epoch = self.loader.my_passes, self.epoch
        cursor.counts, cursor.facts = self.pad, self.facts
        if self.is_free_running:
            self.loader.run_independently()
        self.progress.begin(self.loader, cursor)

    def close(self, cursor: Cursor) -> None:
        """End the pass."""
        if not self.is_elastic:
            cursor.commit(cursor.position)  # no loss can repeat a batch
        self.loader.end(cursor)

    def track(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, and record them for checkpoints. If the pass continues from a checkpoint,
        skip the batches that were used."""
        cursor = Cursor(self.members)
        self.open(cursor)
        is_resumed = cursor.is_resumed
        if not is_resumed:
            cursor.draws = save_random_state(())
        try:
            with with_random_state(cursor.draws if is_resumed else None, ()):
                for _ in islice(batches, cursor.position if is_resumed else 0):
                    pass
            for batch in batches:
                self.progress.begin_batch()
                cursor.use(cursor.position)
                cursor.position += 1
                cursor.tally.largest = max(cursor.tally.largest, samples_in(batch))
                yield batch
        finally:
            self.close(cursor)

    def num_done(self, cursor: Cursor) -> int:
        """Return how many batches have counted, and are not needed again."""
        return cursor.committed if self.is_elastic and cursor.counts else cursor.position

    def first_batch_of_number(self, cursor: Cursor, batches: int | None) -> int:
        """Return how many batches of the pass this worker's number has done, for a newcomer at a
        free-running pace. A pass has `batches` batches, and each step takes one."""
        steps = self.job.elastic.committed_steps
        if cursor.is_resumed:
            return cursor.position
        if steps is None or batches is None or not self.pad:
            return 0
        return min(max(0, steps - batches * cursor.index), batches)

    # -- collectives --------------------------------------------------------------------------

    def run_collective(self, attempt: Callable[[], Any]) -> Any:
        """Run a collective; repeat it if a worker is lost."""
        return self.job.elastic.run_step(attempt)

    def wait_for_workers(self) -> None:
        """Wait for the other workers at the end of a pass, to notice losses."""
        with self.job.reporter.waiting:
            self.run_collective(lambda: self.group.barrier())


# -- agreement ------------------------------------------------------------------------------------

_groups: WeakKeyDictionary[Job, Group] = WeakKeyDictionary()


def group_of(job: Job) -> Group:
    """Return the group for the data of a job. All ranks create it at first use."""
    if job not in _groups:
        _groups[job] = job.worker_group("data")
    return _groups[job]


def agree_if_new(
    job: Job, loader: LoaderState, problem: str | None, facts: dict[str, Any], aside: dict[str, Any]
) -> list[dict[str, Any]]:
    """Agree about a loader when the script passes it for the first time, and when a pass begins.

    A newcomer passes its loaders after the other workers did, and enters a pass that is open: it
    uses their answers. A free-running worker asks no other. Nor does a worker that continues a pass
    from a checkpoint: at a free-running pace other workers may have ended the pass before it.
    """
    is_call, elastic = facts.get("the epoch of this pass") is None, job.elastic
    if not elastic.is_on:
        is_known = not is_call and loader.saved is not None
    else:
        is_in_pass = loader.is_pass_known or loader.saved is not None
        is_known = bool(loader.answers) if is_call else is_in_pass
        is_known = is_known or elastic.is_joining or not elastic.is_lockstep
    if not is_known:
        answers, first = _agree(job, problem, facts, aside), loader.answers
        if first:
            answers[0]["seed"] = first[0]["seed"]  # the script may have seeded again since
        loader.answers = answers
    elif problem is not None:
        raise named(aside["problem"], f"pl.shard: {problem}")
    return loader.answers or [aside]


def _agree(
    job: Job, problem: str | None, facts: Mapping[str, Any], aside: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Check that no rank has a problem and that all ranks have the same facts; return `aside` of
    each rank. Collective: all ranks return, or all raise the same UsageError."""
    group = group_of(job.full_view)  # on a mesh also the workers that get the same batches
    mine = [problem, dict(facts), dict(aside)]
    with job.reporter.waiting:
        ranks, entries = job.elastic.run_step(
            lambda: [list(group.ranks), all_gather_object(group, mine)]
        )
    try:
        raise_first_problem(ranks, "pl.shard", [entry[0] for entry in entries])
    except UsageError as error:
        kinds = [entry[2].get("problem") for entry in entries if entry[0] is not None]
        raise named(kinds[0] or "UsageError", str(error)) from None
    expected = entries[0][1]
    for rank, (_, found, _) in zip(ranks, entries, strict=True):
        for name in expected:
            if found.get(name) != expected[name]:
                kind = DataError if name in _LENGTHS else UsageError
                raise kind(
                    f"pl.shard: {name} is {found.get(name)!r} on rank {rank}, expected"
                    f" {expected[name]!r} as on rank {ranks[0]}; pass the same loader and"
                    " arguments on every rank, or presharded=True if each rank has data of its own"
                )
    return [entry[2] for entry in entries]
