"""What is kept to be sent again, and for how long."""

from __future__ import annotations

import random

from paceline.ps.client.failover import PendingRequests


def kept(books: PendingRequests[str]) -> list[str]:
    return [one.content for one in books]


def test_requests_are_numbered_from_one_in_the_order_in_which_they_are_made() -> None:
    books = PendingRequests[str]()
    assert [books.add("a").seq, books.add("b", has_reply=False).seq, books.add("c").seq] == [
        1,
        2,
        3,
    ]
    assert kept(books) == ["a", "b", "c"]


def test_a_question_is_kept_until_it_is_answered_and_no_longer() -> None:
    books = PendingRequests[str]()
    first, second = books.add("first"), books.add("second")
    books.answered(second.seq)
    assert kept(books) == ["first"]  # its answer may take long: the order of answers is free
    books.answered(first.seq)
    assert kept(books) == [] and len(books) == 0


def test_a_message_is_kept_until_a_later_question_is_answered() -> None:
    books = PendingRequests[str]()
    early = books.add("early")
    books.add("push", has_reply=False)
    commit = books.add("commit")
    books.add("next push", has_reply=False)
    books.answered(early.seq)
    assert kept(books) == ["push", "commit", "next push"]  # nothing proves that it was handled
    books.answered(commit.seq)
    assert kept(books) == ["next push"]


def test_what_was_never_sent_can_be_withdrawn() -> None:
    books = PendingRequests[str]()
    books.add("push", has_reply=False)
    books.withdraw(books.add("wrong").seq)
    assert kept(books) == ["push"]
    assert books.add("next").seq == 3  # its number is not given again


def test_numbers_below_the_first_that_is_kept_are_never_repeated() -> None:
    books = PendingRequests[int]()
    chosen, open_questions = random.Random(7), list[int]()
    for number in range(2000):
        if chosen.random() < 0.4:
            books.add(number, has_reply=False)
        else:
            open_questions.append(books.add(number).seq)
        while len(open_questions) > chosen.randrange(1, 20):
            books.answered(open_questions.pop(chosen.randrange(len(open_questions))))
        numbers = [one.seq for one in books]
        assert numbers == sorted(numbers)
        assert set(open_questions) <= set(numbers)
        assert books.read_below == (numbers[0] if numbers else number + 2)
        # A message that is kept is newer than every question that was answered.
        answered = set(range(1, number + 2)) - set(numbers)
        assert len(numbers) - len(open_questions) <= number + 1 - max(answered, default=0)
