"""A push at `ps` goes through few files, and docs/gradient-journey.md names exactly those."""

from __future__ import annotations

from pathlib import Path

import torch

import paceline as pl
from paceline.pace.server import ServerExchange
from paceline.ps.server.server import Server
from paceline.ps.server.table_requests import Hosted
from paceline.runtime import server_main as serve
from support.body import pack, tell
from support.environs import job_environs
from support.passages import Passages, documented
from support.ranks import _unpack_and_join, started_processes

LIMIT = 20
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gradient-journey.md"
# On both sides: a frame goes out, is awaited and comes in; in between the average is made. Leaves
# that only compute (the bytes of a header, checksums, kernels of an instruction set) are left out.
CPP = (
    "bindings/module.cc",
    "paceline/collectives/group.cc",
    "paceline/collectives/point_to_point.cc",
    "paceline/engine/engine.cc",
    "paceline/loop/operation.cc",
    "paceline/transport/port.cc",
    "paceline/transport/channel.cc",
    "paceline/reduce/kernels.cc",
)
STEPS, USUAL = 12, 8  # the first steps make what later ones use again


def train(_group: object) -> list[str]:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = pl.distribute(model, optimizer, pace="ps")
    walk = Passages(ServerExchange.submit, ServerExchange.call_roll)
    for _ in range(STEPS):
        with walk:
            model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return walk.usual(USUAL)


def serve_and_tell() -> None:
    with Passages(Server.serve, keep=Hosted.on_push) as walk:
        status = serve.main()
    tell(walk.usual(USUAL))
    assert status == 0


def test_a_push_goes_through_the_files_that_the_page_names() -> None:
    with job_environs(2, 1, None, 1, None, ()) as environs:
        joining = (_unpack_and_join, (pack(train), ()))
        with started_processes([joining, joining, (serve_and_tell, ())], environs) as ranks:
            on_server = ranks.hear(2)
            on_worker, *_ = ranks.values(60)
    walked = {*on_worker, "ps/server/process.py", *on_server, *(f"cpp/{name}" for name in CPP)}
    assert all((ROOT / "cpp" / name).exists() for name in CPP)
    assert walked == set(documented(PAGE, "## The server route"))
    assert len(walked) <= LIMIT, sorted(walked)
