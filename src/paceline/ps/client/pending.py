"""What a worker has asked and not been answered yet: the books of one line. Pure.

Requests are numbered in the order in which they are made, and a server handles them in that order,
however long each answer takes. When another server takes over, whatever is still in these books is
sent to it again with its old number; what that server has handled already it answers, and does not
do again.

    a question    is kept until its answer has been read
    a message     that has no answer is kept until a later question is answered: by then every
                  replica has handled it too

Threads: none; the link calls under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Content = TypeVar("Content")


@dataclass(eq=False)
class Numbered(Generic[Content]):
    """A request under its number, with whatever is needed to send it again."""

    seq: int
    content: Content


class Unanswered(Generic[Content]):
    """The requests of one line that may have to be sent again, in order."""

    def __init__(self) -> None:
        self._last = 0
        self._kept: dict[int, Numbered[Content]] = {}  # dicts keep their order: that of numbers
        self._messages: deque[int] = deque()  # numbers of those without an answer

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Numbered[Content]]:
        """What has to be sent to a server that takes over, in order."""
        return iter(list(self._kept.values()))

    @property
    def read_below(self) -> int:
        """Every question with a lower number has been answered: nobody will repeat it."""
        return next(iter(self._kept), self._last + 1)

    def ask(self, content: Content) -> Numbered[Content]:
        """Number a question."""
        self._last += 1
        asked = self._kept[self._last] = Numbered(self._last, content)
        return asked

    def tell(self, content: Content) -> Numbered[Content]:
        """Number a message that nobody answers."""
        told = self.ask(content)
        self._messages.append(told.seq)
        return told

    def answered(self, seq: int) -> None:
        """Forget a question whose answer has been read, and messages that were handled before."""
        self._kept.pop(seq, None)
        while self._messages and self._messages[0] < seq:
            self._kept.pop(self._messages.popleft(), None)

    def withdraw(self, seq: int) -> None:
        """Forget a request that was never sent."""
        self._kept.pop(seq, None)
