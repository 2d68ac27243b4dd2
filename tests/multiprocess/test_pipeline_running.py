"""Pipelines against the same model in one process.

Every rank computes the reference itself. Tolerance: sums over microbatches are in another order
than over the batch, so float64 differs in the last places, which 20 steps make larger: 1e-10.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_models import (
    MODELS,
    chain_batch,
    ladder_batch,
    make,
    run_whole,
    shared_of,
    taken,
    transformer_batch,
    transformer_loss,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from paceline.errors import PacelineError, PeerError, PeerLost, UsageError
from paceline.model_parallel.pipeline.pipeline import Pipeline
from paceline.model_parallel.pipeline.schedules import stages_of_rank, stages_per_process
from support import report, run_ranks, started

SCHEDULES = ["gpipe", "1f1b", "interleaved:2", "zero-bubble"]
STEPS = 20


# -- in the ranks ---------------------------------------------------------------------------------


def start() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("paceline")
    return dist.get_rank()


def pipeline_of(name: str, schedule: str, microbatches: int | str = "auto") -> tuple[Any, Any, Any]:
    """Return a pipeline, the stages of this process, and the whole model."""
    rank, size = dist.get_rank(), dist.get_world_size()
    num_stages = size * stages_per_process(schedule)
    whole, indices = make(name, num_stages), stages_of_rank(schedule, rank, size)
    stages = taken(whole, indices)
    pipeline = Pipeline(
        stages,
        indices,
        num_stages,
        dist.group.WORLD,
        MODELS[name][2],
        schedule,
        microbatches,
        shared_of(name, num_stages),
    )
    return pipeline, nn.ModuleList(stages), nn.ModuleList(whole)


def close(found: Any, expected: Any, what: str) -> None:
    if expected is None or found is None:
        assert found is expected, what
        return
    torch.testing.assert_close(
        found, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{what}: {text}"
    )


def compare(stages: nn.ModuleList, whole: nn.ModuleList, indices: list[int], what: str) -> None:
    for index, stage in zip(indices, stages, strict=True):
        for name, param in stage.named_parameters():
            expected = whole[index].get_parameter(name)
            close(param, expected, f"{what}: {name}")
            close(param.grad, expected.grad, f"{what}: gradient of {name}")


def train_both(name: str, schedule: str, microbatches: int | str, sizes: list[int]) -> None:
    """Train a pipeline and one process; batches have the given sizes in turn."""
    pipeline, stages, whole = pipeline_of(name, schedule, microbatches)
    _, make_batch, loss = MODELS[name]
    ours = torch.optim.SGD(stages.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
    theirs = torch.optim.SGD(whole.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
    indices = stages_of_rank(schedule, dist.get_rank(), dist.get_world_size())
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        inputs, targets = make_batch(sizes[step % len(sizes)])
        what = f"{name}, {schedule}, step {step}, rank {dist.get_rank()}"
        expected = loss(run_whole(list(whole), inputs), targets)
        expected.backward()
        close(pipeline.forward_backward(inputs, targets), expected.detach(), f"{what}: loss")
        ours.step(), theirs.step()
        compare(stages, whole, indices, what)
        ours.zero_grad(), theirs.zero_grad()


class Dropping(nn.Module):
    """A stage that drops half of its input."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (nn.functional.dropout(x, 0.5),)

    def unflatten(self, outputs: Any) -> Any:
        return outputs[0]


def note_dtype(into: list[torch.dtype], _: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
    into.append(given[0].dtype)


def refuse(*_: object) -> None:
    raise ArithmeticError("no more")


# -- tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_training_equals_one_process(world_size, name):
    def body(_):
        start()
        for schedule in SCHEDULES:
            train_both(name, schedule, 4, [8])

    run_ranks(world_size, body)


def test_batches_may_change_from_step_to_step():
    def body(_):
        start()
        train_both("ladder", "1f1b", "auto", [8, 6, 1, 7])
        train_both("chain", "zero-bubble", 2, [4, 2, 6])
        pipeline, _, whole = pipeline_of("transformer", "1f1b", 2)
        for length in (6, 3, 3, 9):
            inputs, targets = transformer_batch(4, length)
            expected = transformer_loss(run_whole(list(whole), inputs), targets).detach()
            close(pipeline.forward_backward(inputs, targets), expected, f"length {length}")

    run_ranks(2, body)


def test_evaluation_gives_the_whole_output_everywhere():
    def body(_):
        start()
        for schedule in ("1f1b", "zero-bubble"):
            for microbatches in ("auto", 3):
                pipeline, stages, whole = pipeline_of("ladder", schedule, microbatches)
                for rows in (8, 7, 1):
                    inputs, _ = ladder_batch(rows)
                    expected = run_whole(list(whole), inputs)
                    found = pipeline.evaluate(inputs)
                    assert not found["x"].requires_grad and found["numbers"].dtype == torch.int64
                    close(found, {k: v.detach() for k, v in expected.items()}, f"{rows} rows")
                assert all(p.grad is None for p in stages.parameters())

    run_ranks(2, body)


def test_model_whose_output_is_its_loss():
    def body(_):
        rank = start()
        whole = make("chain", 2)
        whole[1].register_forward_hook(
            lambda _module, _given, outputs: (outputs[0].square().mean(),)
        )
        pipeline = Pipeline(
            [whole[rank]], [rank], 2, init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), None
        )
        (inputs, _), reference = chain_batch(8), taken(whole, [0, 1])
        expected = run_whole(reference, inputs)
        expected.backward()
        close(pipeline.forward_backward(inputs), expected.detach(), "loss")
        for name, param in whole[rank].named_parameters():
            close(param.grad, reference[rank].get_parameter(name).grad, name)
        # A number, not rows: parts of a batch cannot be put together, so it is evaluated as one.
        for _ in range(2):
            close(pipeline.evaluate(inputs), expected.detach(), "evaluation")

    run_ranks(2, body)


def test_gradients_add_up_and_are_scaled():
    def body(_):
        rank = start()
        for schedule in ("1f1b", "zero-bubble"):
            pipeline, stages, whole = pipeline_of("transformer", schedule, 2)
            for scale in (1.0, 0.25):
                inputs, targets = transformer_batch(4)
                loss = transformer_loss(run_whole(list(whole), inputs), targets)
                (loss * scale).backward()
                close(pipeline.forward_backward(inputs, targets, scale), loss.detach(), "loss")
            compare(stages, whole, stages_of_rank(schedule, rank, 2), schedule)

    run_ranks(2, body)


def test_frozen_parts_get_no_gradients():
    def body(_):
        rank = start()
        for schedule in SCHEDULES:
            pipeline, stages, whole = pipeline_of("chain", schedule, 2)
            indices = stages_of_rank(schedule, rank, 2)
            for index, module in [(0, whole[0]), *zip(indices, stages, strict=True)]:
                module.requires_grad_(index != 0)
            inputs, targets = chain_batch(4)
            nn.functional.mse_loss(run_whole(list(whole), inputs), targets).backward()
            pipeline.forward_backward(inputs, targets)
            compare(stages, whole, indices, schedule)

    run_ranks(2, body)


def test_bfloat16_crosses_under_autocast():
    def body(_):
        rank = start()
        for schedule in SCHEDULES:
            whole = [s.float() for s in make("chain", 2 * stages_per_process(schedule))]
            indices = stages_of_rank(schedule, rank, 2)
            stages = taken(whole, indices)
            crossed: list[torch.dtype] = []
            note = partial(note_dtype, crossed)
            if rank == 1:
                stages[0].register_forward_pre_hook(note)
            pipeline = Pipeline(
                stages, indices, len(whole), dist.group.WORLD, nn.functional.mse_loss, schedule, 4
            )
            inputs, targets = (t.float() for t in (chain_batch(8)[0][0], chain_batch(8)[1]))
            expected = torch.zeros(())
            with torch.autocast("cpu", torch.bfloat16):
                loss = pipeline.forward_backward((inputs,), targets)
                # Of the same microbatches: sums in bfloat16 depend on what is in them.
                for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
                    part = nn.functional.mse_loss(run_whole(whole, (x,)), y) / 4
                    part.backward()
                    expected += part.detach()
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
            assert rank == 0 or set(crossed) == {torch.bfloat16}, crossed
            for index, stage in zip(indices, stages, strict=True):
                for name, param in stage.named_parameters():
                    reference = whole[index].get_parameter(name).grad
                    torch.testing.assert_close(param.grad, reference, rtol=1e-6, atol=1e-6)

    run_ranks(2, body)


def test_stages_drop_other_elements_and_again_the_same():
    def body(_):
        rank = start()
        x = torch.ones(4, 1000)

        def run_twice() -> list[torch.Tensor]:
            torch.manual_seed(7)
            stage, seen = Dropping(), list[torch.Tensor]()
            pipeline = Pipeline([stage], [rank], 2, dist.group.WORLD, torch.dot, "1f1b", 1)
            stage.register_forward_hook(lambda _m, given, made: seen.append(made[0] / given[0]))
            before = torch.get_rng_state()
            for _ in range(2):
                pipeline.evaluate((x,))
            assert torch.get_rng_state().equal(before)  # samplers must go on alike
            return [mask.nan_to_num(0.0) > 0 for mask in seen]

        first, again = run_twice(), run_twice()
        assert not first[0].equal(first[1])
        assert all(a.equal(b) for a, b in zip(first, again, strict=True))
        return first[0]

    zero, one = run_ranks(2, body)
    # What the second keeps of what the first kept is half of it, not all.
    kept = one[zero].float().mean()
    assert 0.4 < kept < 0.6, kept


# -- bad input and faults -------------------------------------------------------------------------


def test_bad_input_is_refused_on_all():
    def body(_):
        rank = start()
        pipeline, stages, _ = pipeline_of("chain", "1f1b", 4)
        inputs, targets = chain_batch(10)
        with pytest.raises(
            UsageError, match=r"10 rows .* 4 equal .*drop_last=True.*microbatches=10"
        ):
            pipeline.forward_backward(inputs, targets)
        with pytest.raises(UsageError, match=r"target has 8 rows, input 0 has 10"):
            pipeline.forward_backward(inputs, targets[:8])
        with pytest.raises(UsageError, match=r"schedule '2f2b': choose one of 'gpipe'"):
            Pipeline(list(stages), [rank], 2, dist.group.WORLD, None, "2f2b")
        with pytest.raises(UsageError, match=r"holds stages \[[01]\] of 2.* needs it to hold"):
            Pipeline(list(stages), [rank], 2, dist.group.WORLD, None, "zero-bubble")
        with pytest.raises(UsageError, match=r"microbatches=0"):
            Pipeline(list(stages), [rank], 2, dist.group.WORLD, None, "1f1b", 0)
        interleaved, _, _ = pipeline_of("chain", "interleaved:2", 5)
        with pytest.raises(UsageError, match=r"5 microbatches .* use microbatches=4"):
            interleaved.forward_backward(*chain_batch(5))
        pipeline.forward_backward(*chain_batch(8))  # nobody was left behind

    run_ranks(2, body)


def test_different_batches_are_noticed():
    def body(_):
        rank = start()
        pipeline, _, _ = pipeline_of("chain", "1f1b", 2)
        with pytest.raises(PacelineError, match=r"4 rows in 2 .* 6 rows in 2"):
            pipeline.forward_backward(*chain_batch(6 - 2 * rank))

    run_ranks(2, body)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_error_of_one_stage_reaches_the_others(schedule):
    def body(world, schedule):
        rank = start()
        pipeline, stages, _ = pipeline_of("chain", schedule, 4)
        pipeline.forward_backward(*chain_batch(8))
        world.barrier()  # in another group: the error ends whatever is left of the first step
        if rank == 1:
            stages[-1].register_forward_pre_hook(refuse)
            with pytest.raises(ArithmeticError, match="no more"):
                pipeline.forward_backward(*chain_batch(8))
        else:
            with pytest.raises(PeerError, match="rank 1.* failed: ArithmeticError: no more"):
                pipeline.forward_backward(*chain_batch(8))

    run_ranks(4, body, schedule)


def test_lost_stage_is_named():
    def body(_):
        start()
        pipeline, _, _ = pipeline_of("chain", "1f1b", 4)
        for step in range(1_000_000):
            try:
                pipeline.forward_backward(*chain_batch(8))
            except PeerLost as error:
                return error.rank
            if step == 3:
                report("training")

    with started(3, body) as ranks:
        ranks.receive_all()
        ranks.kill(1)
        for outcome in ranks.wait(60, ranks=[0, 2]):
            assert outcome.value == 1, outcome
