"""What the reducer refuses, in words: what went wrong, and what to do about it."""

from __future__ import annotations

from paceline.errors import PacelineError, UsageError


def double_backward(name: str) -> UsageError:
    """Return the error about a gradient that has a graph of its own."""
    return UsageError(
        f"backward(create_graph=True): the gradient of {name} has a graph of its own, which cannot"
        " be averaged over the workers; compute inner gradients with torch.autograd.grad(...) and"
        " call backward() without create_graph"
    )


def second_gradient(rank: int, name: str) -> UsageError:
    """Return the error about a gradient that comes after its bucket was sent."""
    return UsageError(
        f"rank {rank}: {name} got another gradient after its bucket was sent; it is used in several"
        " reentrant checkpoints: use checkpoint(..., use_reentrant=False)"
    )


def unfinished_pass(rank: int) -> PacelineError:
    """Return the error about a step after a backward pass that broke off."""
    return PacelineError(
        f"rank {rank}: optimizer.step() after a backward pass that ended with an error (or in the"
        " middle of one): gradients have not been averaged; drop them with zero_grad() and begin"
        " again with a forward pass of the whole model"
    )


def local_gradients(rank: int) -> UsageError:
    """Return the error about a step after a backward pass without exchange."""
    return UsageError(
        f"rank {rank}: optimizer.step() after a backward pass under no_sync(): its gradients have"
        " not been averaged; leave no_sync() for the last backward pass before each step"
    )


def out_of_step(rank: int) -> PacelineError:
    """Return the error about a forward pass after a backward pass that broke off too late."""
    return PacelineError(
        f"rank {rank}: the last backward pass ended with an error after it had sent gradients, so"
        " the workers are out of step; start again from a checkpoint"
    )
