"""Hooks of callbacks: which names there are, what is refused, where an error came from."""

from __future__ import annotations

import pytest

import paceline as pl
from paceline.errors import UsageError
from paceline.trainer.callbacks import NAMES, Callbacks


def test_every_hook_of_the_class_is_known_and_does_nothing():
    hooks = [name for name in vars(pl.Callback) if name.startswith("on_")]
    assert set(hooks) <= set(NAMES)
    for name in hooks:
        arguments = {"on_train_batch_start": 2, "on_train_batch_end": 3, "on_exception": 2}
        assert getattr(pl.Callback(), name)(*[None] * arguments.get(name, 1)) is None


def test_both_names_of_a_hook_are_called_in_order():
    called = []

    class Both:
        def on_train_epoch_end(self, trainer):
            called.append(("lightning", trainer))

        def on_epoch_end(self, trainer):
            called.append(("hugging face", trainer))

        def on_log(self, trainer):
            called.append(("log", trainer))

    Callbacks([Both()]).call("on_train_epoch_end", 7)
    assert called == [("lightning", 7), ("hugging face", 7), ("log", 7)]


def test_hooks_of_steps_are_called_only_where_a_step_begins_or_ends():
    called = []

    class Steps:
        def on_step_end(self, trainer, batch, loss):
            called.append(("step", loss))

        def on_train_batch_end(self, trainer, batch, loss):
            called.append(("batch", loss))

    callbacks = Callbacks([Steps()])
    callbacks.call("on_train_batch_end", None, None, 0.5, at_step=False)
    callbacks.call("on_train_batch_end", None, None, 0.25, at_step=True)
    assert called == [("batch", 0.5), ("batch", 0.25), ("step", 0.25)]


class Misspelt(pl.Callback):
    def on_train_epoch_ends(self, trainer):
        raise AssertionError("this is never called")


class Foreign:
    def on_substep_end(self, trainer): ...


@pytest.mark.parametrize(
    ("callbacks", "text"),
    [
        ([Misspelt()], r"Misspelt has on_train_epoch_ends.*did you mean on_train_epoch_end\?"),
        ([Foreign()], "on_substep_end, which is not a hook.*on_fit_start, on_train_begin"),
        ([Misspelt], r"this is the class; pass an object, Misspelt\(\)"),
        ([print], "has no hook; make it a pl.Callback"),
        (["early"], "a str has no hook"),
        (pl.Callback(), "expected a list of callbacks"),
        ("early", "expected a list of callbacks"),
    ],
)
def test_hooks_that_would_never_be_called_are_refused(callbacks, text):
    with pytest.raises(UsageError, match=text):
        Callbacks(callbacks)


def test_an_attribute_that_is_no_function_is_no_hook():
    class Switched(pl.Callback):
        on_gpu = False

    Callbacks([Switched()])


def test_an_error_says_whose_it_is_and_stays_what_it_was():
    class Careless(pl.Callback):
        def on_fit_start(self, trainer):
            raise KeyError("lost")

    with pytest.raises(KeyError, match="lost") as caught:
        Callbacks([Careless()]).call("on_fit_start", None)
    if hasattr(caught.value, "__notes__"):
        assert "Careless.on_fit_start" in caught.value.__notes__[0]
