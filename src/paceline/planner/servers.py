"""How many servers: a number and its derivation.

With k servers a step waits for the workers' links, the servers' links and the servers' cores. More
servers help until something else is the limit. The derivation predicts every k and reports where
the gain ends: "server links are the limit up to 3 servers; 4 give 1.9 x; a fifth gives nothing".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.planner.predict import Prediction

_NOTHING = 1.05  # a gain below this is none: predictions are not more precise


@dataclass(frozen=True)
class ServerChoice:
    """The number of servers, and why."""

    count: int
    derivation: str
    predictions: tuple[Prediction, ...]  # by number of servers, from 1


def choose_servers(predict_with: Callable[[int], Prediction], most: int) -> ServerChoice:
    """Return the smallest number after which another server gains less than 5 %."""
    predictions = [predict_with(1)]
    best = 1
    for count in range(2, most + 1):
        predictions.append(predict_with(count))
        if predictions[best - 1].step_s / predictions[count - 1].step_s >= _NOTHING:
            best = count
        elif count - best >= 3:  # no gain by any of the last three
            break
    return ServerChoice(best, _derive(predictions, best), tuple(predictions))


def _derive(predictions: list[Prediction], best: int) -> str:
    first, chosen = predictions[0], predictions[best - 1]
    limits = [_limit_words(one.limit) for one in predictions]
    gain = first.step_s / chosen.step_s
    if best == 1:
        words = f"{limits[0]} the limit with 1 server"
        if len(predictions) > 1:
            more = first.step_s / predictions[1].step_s
            words += f"; a second gives {_gain(more)}"
        return words
    reigns = next((at for at, limit in enumerate(limits) if limit != limits[0]), len(limits))
    until = min(reigns, best - 1)
    text = f"{limits[0]} the limit up to {until} server{'s' * (until > 1)}; {best} give"
    text += f" {gain:.2g} x" if gain >= 1.5 else f" {(gain - 1) * 100:.0f} % more"
    if best < len(predictions):
        text += f"; one more gives {_gain(chosen.step_s / predictions[best].step_s)}"
    else:
        text += "; more were not considered"
    return text


def _limit_words(limit: str) -> str:
    words = {
        "link": "server links are",
        "server cores": "server cores are",
        "computation": "the workers' computation is",
        "cores": "the machine's cores are",
    }
    return words.get(limit, f"{limit} is")


def _gain(ratio: float) -> str:
    return "nothing" if ratio < _NOTHING else f"{(ratio - 1) * 100:.0f} %"
