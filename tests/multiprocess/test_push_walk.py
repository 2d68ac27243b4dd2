"""A push at `ps` goes through few files, and docs/gradient-journey.md names exactly those."""

from __future__ import annotations

import torch

import paceline as pl
from paceline.pace.parameter_server import ServerExchange
from paceline.ps.server.server import Server
from paceline.ps.server.table_requests import ServedTable
from paceline.runtime import server_main as serve
from support.body import pack, report
from support.environs import job_environs
from support.passages import Passages, documented
from support.ranks import _unpack_and_join, started_processes
from support.walks import ROOT, cpp_problems

LIMIT = 21  # the bindings are two files since they have more than 400 lines together
PAGE = ROOT / "docs" / "gradient-journey.md"
# On both sides: a frame is sent, awaited and received; in between the average is computed.
# support/walks.py has the rule of what counts.
CPP = {
    "bindings/module.cc": ["start_send", "void wait("],
    "bindings/kernels.cc": ["reduce_mean_at"],
    "paceline/collectives/group.cc": ["Group::enqueue", "Group::run"],
    "paceline/collectives/point_to_point.cc": ["Group::submit_send", "Group::try_match"],
    "paceline/engine/engine.cc": ["Engine::announce_work", "Engine::wait_any", "Engine::poll_all"],
    "paceline/loop/operation.cc": ["Operation::advance", "Operation::finish"],
    "paceline/transport/port.cc": ["Port::send", "Port::pump"],
    "paceline/transport/channel.cc": ["ShmChannel::write_some", "ShmChannel::read_some"],
    "paceline/reduce/kernels.cc": ["void reduce_mean("],
}
STEPS, USUAL = 12, 8  # the first steps make what later ones use again


def train(_group: object) -> list[str]:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = pl.distribute(model, optimizer, pace="ps")
    walk = Passages(ServerExchange.submit, ServerExchange.reduce_used_mask)
    for _ in range(STEPS):
        with walk:
            model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return walk.usual(USUAL)


def serve_and_tell() -> None:
    with Passages(Server.serve, keep=ServedTable.on_push) as walk:
        status = serve.main()
    report(walk.usual(USUAL))
    assert status == 0


def test_a_push_goes_through_the_files_that_the_page_names() -> None:
    with job_environs(2, 1, None, 1, None, ()) as environs:
        joining = (_unpack_and_join, (pack(train), ()))
        with started_processes([joining, joining, (serve_and_tell, ())], environs) as ranks:
            on_server = ranks.receive(2)
            on_worker, *_ = ranks.values(60)
    walked = {*on_worker, "ps/server/process.py", *on_server, *(f"cpp/{name}" for name in CPP)}
    assert cpp_problems(CPP) == []
    assert walked == set(documented(PAGE, "## The server route"))
    assert len(walked) <= LIMIT, sorted(walked)
