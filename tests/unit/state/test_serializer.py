"""State taken apart and put together again."""

from __future__ import annotations

import msgspec
import pytest
import torch

from paceline.errors import UsageError
from paceline.state.protocol import UserObject
from paceline.state.serializer import flatten_state, unflatten_state


def there_and_back(value):
    plain, tensors = flatten_state(value, "it")
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(plain))
    return unflatten_state(told, tensors)


def test_nested_state_survives():
    state = {0: {"step": torch.tensor(3.0)}, "betas": (0.9, 0.99), "names": ["a", None, True]}
    back = there_and_back(state)
    assert back[0]["step"] is state[0]["step"] or torch.equal(back[0]["step"], state[0]["step"])
    assert back["betas"] == (0.9, 0.99) and back["names"] == ["a", None, True]


def test_a_scheduler_goes_on_where_another_was():
    def schedule():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    (optimizer, old), (_, new) = schedule(), schedule()
    for _ in range(3):
        optimizer.step()
        old.step()
    UserObject("scheduler", new).load(UserObject("scheduler", old).state(), None)
    assert new.last_epoch == 3 and new.get_last_lr() == old.get_last_lr()


def test_what_cannot_be_written_down_is_refused_by_name():
    with pytest.raises(UsageError, match=r"carry\(x=...\) has a function"):
        flatten_state({"f": there_and_back}, "carry(x=...)")


def test_an_object_without_state_is_refused():
    with pytest.raises(UsageError, match="has no state_dict"):
        UserObject("thing", object())
