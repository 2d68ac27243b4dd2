"""What compressing costs: the kernels on one core, beside a copy of as many bytes.

    python bench/compression.py                     25 M float32, 15 rounds: about 2 min
    python bench/compression.py --only int8 onebit --rounds 40
    python bench/compression.py --quick             1 M float32, 3 rounds

Every kernel runs once in a round, followed by a copy that reads and writes as many
bytes as the kernel has to (half of their sum in, half out), in the faster of two ways: torch's
`copy_`, or past the cache. "x copy" is how much longer the kernel takes, by the minima and by the
medians over all rounds. A selection has torch.topk beside it instead, and "x faster" is how much
longer that takes. Tensors are larger than the cache unless --quick is given.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from harness.report import machine, time_text, write_json

from paceline import _core
from paceline.compress import blocks
from paceline.compress import sparse_format as sparse
from paceline.compress.kernels import Draw

_DRAW = Draw(1, 2)
_PART = 0.01  # of the elements, in sparse tensors


@dataclass
class Case:
    """One kernel, and how many bytes it must read and write at least; 0: beside torch.topk."""

    group: str
    name: str
    run: Callable[[], object]
    num_bytes: int
    times_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)


class Copy:
    """Copies of any size, each in the faster of two ways."""

    def __init__(self, most_bytes: int) -> None:
        self._source = torch.ones(most_bytes, dtype=torch.uint8)
        self._target = torch.zeros(most_bytes, dtype=torch.uint8)

    def time_s(self, num_bytes: int) -> float:
        source, target = self._source[:num_bytes], self._target[:num_bytes]
        where = source.data_ptr(), target.data_ptr(), num_bytes
        return min(
            seconds(lambda: target.copy_(source)), seconds(lambda: _core.copy_past_cache(*where))
        )


def seconds(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def block_cases(name: str, values: torch.Tensor, residual: torch.Tensor) -> Iterator[Case]:
    count, size = len(values), blocks.payload_bytes(name, len(values))
    rows = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
    payload, out, dense = torch.empty_like(rows[0]), torch.empty(count), 4 * count
    for row in rows:
        blocks.encode(name, values, row, draw=_DRAW)

    def encode(left: torch.Tensor | None) -> None:
        blocks.encode(name, values, payload, residual=left, draw=_DRAW)

    def recode(left: torch.Tensor | None) -> None:
        blocks.recode(name, rows, payload, residual=left, count=count, draw=_DRAW)

    yield Case(name, "encode", lambda: encode(None), dense + size)
    yield Case(name, "encode, residual", lambda: encode(residual), 3 * dense + size)
    yield Case(name, "decode", lambda: blocks.mean(name, rows[:1], out), dense + size)
    yield Case(name, "mean of 2", lambda: blocks.mean(name, rows, out), dense + 2 * size)
    yield Case(name, "recode of 2", lambda: recode(None), 3 * size)
    yield Case(name, "recode of 2, residual", lambda: recode(residual), 2 * dense + 3 * size)


def shared_cases(values: torch.Tensor, residual: torch.Tensor) -> Iterator[Case]:
    count, group = len(values), "int8 shared"
    absmax = torch.empty(blocks.num_shared_blocks(count))
    part, out = torch.empty(count, dtype=torch.int8), torch.empty(count)
    blocks.block_absmax(values, None, absmax)

    def encode() -> None:
        blocks.encode_shared(values, absmax, 63, part, residual=residual)

    yield Case(
        group, "absmax", lambda: blocks.block_absmax(values, residual, absmax), 2 * 4 * count
    )
    yield Case(group, "encode, residual", encode, 13 * count)
    yield Case(group, "decode", lambda: blocks.decode_shared(part, absmax, 63, 2, out), 5 * count)


def sparse_cases(values: torch.Tensor, residual: torch.Tensor) -> Iterator[Case]:
    count, k = len(values), round(len(values) * _PART)
    indices, chosen = torch.empty(k, dtype=torch.int32), torch.empty(k)
    drawn, out = torch.empty(k, dtype=torch.int32), torch.empty(count)
    sparse.select(values, k, indices, chosen)
    width, row = sparse.gap_format(count, k), (indices.clone(), chosen.clone())
    packed = torch.empty(sparse.gap_bytes(count, k, width), dtype=torch.uint8)
    gaps = len(packed) + 4 * k

    def select(left: torch.Tensor | None) -> None:
        sparse.select(values, k, indices, chosen, residual=left)

    group = f"top {_PART:.0%}"
    yield Case(group, "select", lambda: select(None), 0)
    yield Case(group, "select, residual", lambda: select(residual), 0)
    yield Case(group, "mean of 2", lambda: sparse.scatter_mean([row, row], out), 4 * count + 16 * k)
    yield Case(
        group, "pack gaps", lambda: sparse.pack_gaps(row[0], count, packed, width=width), gaps
    )
    yield Case(
        group, "unpack gaps", lambda: sparse.unpack_gaps(packed, count, drawn, width=width), gaps
    )
    yield Case(group, "random", lambda: sparse.random_indices(count, k, _DRAW, drawn), 4 * k)


def measure(cases: list[Case], values: torch.Tensor, rounds: int) -> None:
    copy = Copy(max(case.num_bytes for case in cases) // 2)
    k = round(len(values) * _PART)
    for number in range(rounds):
        topk_s = 0.0
        if number < 3 and any(not case.num_bytes for case in cases):
            topk_s = seconds(lambda: values.abs().topk(k, sorted=False))
        for case in cases:
            case.run()  # its tensors are where the last round of it would have left them
            case.times_s.append(seconds(case.run))
            if case.num_bytes:
                case.beside_s.append(copy.time_s(case.num_bytes // 2))
            elif topk_s:
                case.beside_s.append(topk_s)


def show(cases: list[Case]) -> list[dict[str, Any]]:
    """Print the table; return its rows."""
    rows = []
    head = f"{'':12} {'kernel':22} {'min':>10} {'median':>10} {'beside: min':>12} {'median':>10}"
    print(f"{head} {'x copy':>14} {'x faster':>15}   (by minimum, by median)")
    for case in cases:
        times = [min(case.times_s), statistics.median(case.times_s)]
        beside = [min(case.beside_s), statistics.median(case.beside_s)]
        ratios = [a / b for a, b in zip(times, beside, strict=True)]
        texts = [f"{time_text(value):>10}" for value in (*times, *beside)]
        line = f"{case.group:12} {case.name:22} {texts[0]} {texts[1]}   {texts[2]} {texts[3]}"
        if case.num_bytes:
            print(f"{line} {ratios[0]:7.2f} {ratios[1]:6.2f}")
        else:
            print(f"{line} {'':14} {1 / ratios[0]:8.1f} {1 / ratios[1]:6.1f}")
        rows.append(
            {
                "group": case.group,
                "kernel": case.name,
                "bytes": case.num_bytes,
                "time_s": times,
                "beside": "copy" if case.num_bytes else "torch.topk",
                "beside_s": beside,
                "ratio": ratios,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    groups = [*blocks.FORMATS, "shared", "sparse"]
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=groups, default=groups)
    parser.add_argument("--quick", action="store_true", help="small tensors, three rounds")
    options = parser.parse_args()
    count, rounds = (10**6, 3) if options.quick else (options.elements, options.rounds)
    facts = {**machine(), "torch": torch.__version__, "kernels": _core.kernel_name()}
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))
    print(f"{count / 1e6:.0f} M float32, one thread, {rounds} rounds\n")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    values, residual = torch.randn(count), torch.zeros(count)
    cases: list[Case] = []
    for group in options.only:
        if group == "shared":
            cases += shared_cases(values, residual)
        elif group == "sparse":
            cases += sparse_cases(values, residual)
        else:
            cases += block_cases(group, values, residual)
    measure(cases, values, rounds)
    rows = show(cases)
    content = {"machine": facts, "options": vars(options), "elements": count, "rows": rows}
    print(f"written to {write_json('compression', content)}")


if __name__ == "__main__":
    main()
