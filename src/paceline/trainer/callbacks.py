"""Callback: hooks between batches and epochs of a Trainer.

Hooks have Lightning's names. The names of Hugging Face's Trainer are called at the same places. All
hooks get the Trainer, and nothing else that they do not need:

    on_fit_start             on_train_begin    hook(trainer)
    on_train_epoch_start     on_epoch_begin    hook(trainer)
    on_train_batch_start     on_step_begin     hook(trainer, batch)
    on_train_batch_end       on_step_end       hook(trainer, batch, loss)
    on_validation_epoch_end  on_evaluate       hook(trainer)
    on_train_epoch_end       on_epoch_end      hook(trainer)
                             on_log            the same
    on_save_checkpoint       on_save           hook(trainer)
    on_fit_end               on_train_end      hook(trainer)
    on_exception                               hook(trainer, error)

A step of several batches (`accumulate`) begins with the first and ends with the last of them;
on_step_begin and on_step_end are called there.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError
from paceline.runtime.console import warn

if TYPE_CHECKING:
    from paceline.trainer.trainer import Trainer

_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "on_fit_start": ("on_train_begin",),
    "on_train_epoch_start": ("on_epoch_begin",),
    "on_train_batch_start": ("on_step_begin",),
    "on_train_batch_end": ("on_step_end",),
    "on_validation_epoch_end": ("on_evaluate",),
    "on_train_epoch_end": ("on_epoch_end", "on_log"),
    "on_save_checkpoint": ("on_save",),
    "on_fit_end": ("on_train_end",),
    "on_exception": (),
}
_OF_STEPS = ("on_step_begin", "on_step_end")
NAMES = [name for names in _OTHER_NAMES.items() for name in (names[0], *names[1])]


class Callback:
    """Hooks between batches and epochs of a `pl.Trainer`; subclasses define the hooks that they
    need.

    All workers call the hooks; to do something once, ask `pl.rank() == 0`. A hook that sets
    `trainer.should_stop = True`, on any worker, ends the training on all workers. The averages of
    the epoch are in `trainer.metrics`. A callback that has `state_dict` and `load_state_dict` is
    saved with the trainer's checkpoints.

    >>> class Patience(pl.Callback):
    ...     def on_validation_epoch_end(self, trainer):
    ...         trainer.should_stop = trainer.metrics["val_loss"] < 0.1
    """

    def on_fit_start(self, trainer: Trainer) -> None:
        """Training begins; a checkpoint, if there is one, has been loaded."""

    def on_train_epoch_start(self, trainer: Trainer) -> None:
        """An epoch begins, or continues in a resumed job."""

    def on_train_batch_start(self, trainer: Trainer, batch: Any) -> None:
        """The model is about to see a batch."""

    def on_train_batch_end(self, trainer: Trainer, batch: Any, loss: float) -> None:
        """A batch is done, and the optimizer's step if one was due."""

    def on_validation_epoch_end(self, trainer: Trainer) -> None:
        """The epoch has been evaluated; before on_train_epoch_end."""

    def on_train_epoch_end(self, trainer: Trainer) -> None:
        """The epoch is over."""

    def on_save_checkpoint(self, trainer: Trainer) -> None:
        """A save has begun; it is written in the background."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """Training is over."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Training ends with an error, which is raised afterwards."""


class Callbacks:
    """The callbacks of one Trainer, in order."""

    def __init__(self, given: Iterable[Any]) -> None:
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise UsageError(f"Trainer(callbacks={given!r:.60}): expected a list of callbacks")
        self.all = list(given)
        for callback in self.all:
            _require_known_hooks(callback)

    def have(self, name: str) -> bool:
        """Return whether a callback defines this hook, under one of its names."""
        names = (name, *_OTHER_NAMES[name])
        return any(_defines(callback, one) for callback in self.all for one in names)

    def call(self, name: str, *arguments: Any, at_step: bool = True) -> None:
        """Call a hook of all callbacks; `at_step`: this batch begins or ends a step."""
        names = (name, *_OTHER_NAMES[name])
        for callback in self.all:
            for one in names:
                hook = getattr(callback, one, None)
                if hook is not None and (at_step or one not in _OF_STEPS):
                    _call(callback, one, hook, arguments)


def _defines(callback: Any, name: str) -> bool:
    hook = getattr(callback, name, None)
    inherited = getattr(Callback, name, None)  # does nothing
    return hook is not None and (inherited is None or getattr(hook, "__func__", None) != inherited)


def _call(callback: Any, name: str, hook: Any, arguments: tuple[Any, ...]) -> None:
    try:
        hook(*arguments)
    except Exception as error:
        where = f"raised in {type(callback).__name__}.{name}, a callback of pl.Trainer"
        if hasattr(error, "add_note"):
            error.add_note(where)
        else:  # Python 3.10
            warn(f"{type(error).__name__} {where}")
        raise


def _require_known_hooks(callback: Any) -> None:
    """Raise UsageError for a misspelt hook, which would never be called."""
    kind = type(callback).__name__
    if isinstance(callback, type):
        raise UsageError(
            f"Trainer(callbacks=[{callback.__name__}]): this is the class; pass an object,"
            f" {callback.__name__}()"
        )
    hooks = [name for name in dir(callback) if name.startswith("on_")]
    hooks = [name for name in hooks if callable(getattr(callback, name, None))]
    for name in hooks:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            guess = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(
                f"callback {kind} has {name}, which is not a hook{guess}; hooks are"
                f" {', '.join(NAMES)}"
            )
    if not hooks:
        raise UsageError(
            f"Trainer(callbacks=[{callback!r:.60}]): a {kind} has no hook; make it a pl.Callback"
            f" with one of {', '.join(NAMES)}"
        )
