"""Weight gradients computed in their bucket: the same bits as autograd's own, whatever happens.

Every rank computes with the same data. Then the mean over two ranks is exactly each rank's own
gradient, (g + g) / 2 = g, and a plain copy of the model gives the bits that are expected.
"""

from __future__ import annotations

import copy
import io

import torch
from torch import nn

import paceline as pl
from paceline.data_parallel import direct_gradients as direct
from support import run_ranks

WIDTH = 256  # WIDTH * WIDTH is just large enough


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        h = torch.relu(self.twice(h))
        return self.last(torch.relu(self.twice(h)))


def make() -> tuple[nn.Module, nn.Module]:
    """Return a distributed model and a plain one with the same parameters."""
    assert WIDTH * WIDTH >= direct.MIN_ELEMENTS
    torch.manual_seed(1)
    plain = Net()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pl.distribute(model, optimizer, update="replicated", bucket_mb=0.5)
    return model, plain


def same_gradients(model: nn.Module, plain: nn.Module, tolerance: float = 0.0) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            difference = (p.grad - q.grad).abs().max() / q.grad.abs().max()
            assert difference <= tolerance, (name, difference)


def both(model: nn.Module, plain: nn.Module, compute, tolerance: float = 0.0) -> None:
    """Do the same to both, twice, so that leftovers of the first time would show."""
    for _ in range(2):
        for net in (model, plain):
            net.zero_grad()
            compute(net)
        same_gradients(model, plain, tolerance)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(7))


def test_equal_to_autograds_own():
    def body(group):
        model, plain = make()
        replaced = [m for m in model.modules() if "forward" in vars(m)]
        assert len(replaced) == 3

        both(model, plain, lambda net: net(x(5)).square().sum().backward())
        both(model, plain, lambda net: net(x(5, 4)).square().sum().backward())  # 3 dimensions
        both(model, plain, lambda net: net(x(1)).sum().backward())

        def penalty(net):  # the weight is used besides the layer
            (net(x(4)).sum() + net.first.weight.square().sum()).backward()

        both(model, plain, penalty)

        def two_forwards(net):
            (net(x(4)).sum() + net(x(2)).square().sum()).backward()

        both(model, plain, two_forwards)

        def twice(net):
            loss = net(x(4)).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()

        both(model, plain, twice)

        def accumulate(net):
            no_sync = getattr(net, "no_sync", torch.enable_grad)
            with no_sync():
                net(x(4)).sum().backward()
            net(x(3)).square().sum().backward()

        both(model, plain, accumulate)

        def not_zeroed(net):
            net(x(4)).sum().backward()
            net.zero_grad(set_to_none=False)
            net(x(3)).square().sum().backward()

        both(model, plain, not_zeroed)

        def autocast(net):
            # Without oneDNN, whose bfloat16 kernels end in SIGILL on some virtual machines.
            with torch.backends.mkldnn.flags(enabled=False):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = net(x(4)).float().square().sum()
                loss.backward()

        both(model, plain, autocast)

    run_ranks(2, body)


def test_nobody_else_gets_the_buckets_memory():
    def body(group):
        model, plain = make()

        # torch.autograd.grad gives gradients to keep.
        kept = torch.autograd.grad(model(x(4)).sum(), list(model.parameters()))
        before = [grad.clone() for grad in kept]
        model(x(3)).square().sum().backward()
        assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
        expected = torch.autograd.grad(plain(x(4)).sum(), list(plain.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))

        # A gradient penalty differentiates through the gradient of the input.
        def penalised(net):
            inputs = x(4).requires_grad_()
            (slope,) = torch.autograd.grad(net(inputs).sum(), inputs, create_graph=True)
            (net(inputs).square().sum() + slope.square().sum()).backward()

        # Four contributions to a weight, which autograd may add in another order: float32 rounding.
        both(model, plain, penalised, tolerance=1e-6)

        # A hook of the script may keep what it sees.
        seen: list[torch.Tensor] = []
        handle = model.first.weight.register_hook(seen.append)
        model.zero_grad()
        model(x(4)).sum().backward()
        first = seen[0].clone()
        model(x(3)).square().sum().backward()
        assert torch.equal(seen[0], first)
        handle.remove()

        # Only some inputs of backward.
        model.zero_grad()
        inputs = x(4).requires_grad_()
        model(inputs).sum().backward(inputs=[inputs])
        assert all(p.grad is None for p in model.parameters())

    run_ranks(2, body)


def test_copies_are_plain_again():
    def body(group):
        model, plain = make()
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for other in (twin, loaded):
            assert not any(
                isinstance(vars(m).get("forward"), direct._DirectForward) for m in other.modules()
            )
            other.zero_grad()
            plain.zero_grad()
            other(x(4)).sum().backward()  # no exchange: a rank may do this alone
            plain(x(4)).sum().backward()
            same_gradients(other, plain)
        with torch.no_grad():
            assert torch.equal(model(x(4)), plain(x(4)))
        slopes = torch.func.vmap(torch.func.grad(lambda row: model(row[None]).sum()))(x(3))
        assert slopes.shape == (3, WIDTH)
        model.first.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))  # not the bucket's any more
        assert torch.isfinite(model(x(2))).all()

    run_ranks(2, body)
