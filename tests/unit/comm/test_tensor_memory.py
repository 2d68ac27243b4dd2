"""Tensors whose memory the core reads by itself, and gradients that it copies."""

from __future__ import annotations

import pytest
import torch

from paceline import _core
from paceline.comm.tensors import can_read, dtype_code

DTYPES = [getattr(torch, name) for name in _core.DTYPES]


def exported() -> bool:
    """Whether this torch exports its tensors; otherwise Python reads all of them."""
    return _core.use_tensor_types(torch.Tensor, torch.nn.Parameter)


@pytest.mark.skipif(not exported(), reason="this torch does not export its tensors")
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_tensors_are_read(dtype: torch.dtype) -> None:
    assert can_read(torch.zeros(3, 4, dtype=dtype))
    assert can_read(torch.zeros(5, 4, dtype=dtype)[1:3])
    assert can_read(torch.zeros((), dtype=dtype))
    assert can_read(torch.zeros(3, 1, dtype=dtype).as_strided((3, 1), (1, 77)))
    if dtype.is_floating_point:
        assert can_read(torch.nn.Parameter(torch.zeros(3, dtype=dtype)))
        assert can_read(torch.zeros(3, dtype=dtype, requires_grad=True) * 2)


def other_tensors() -> dict[str, object]:
    plain = torch.ones(4, 5)

    class Own(torch.Tensor):
        pass

    return {
        "array": plain.numpy(),
        "number": 1.0,
        "nothing": None,
        "transposed": plain.t(),
        "columns": plain[:, 1:],
        "expanded": torch.ones(1).expand(3),
        "empty": torch.ones(0),
        "sparse": plain.to_sparse(),
        "complex": torch.ones(3, dtype=torch.complex64),
        "8-bit float": plain.to(torch.float8_e4m3fn),
        "meta": plain.to("meta"),
        "negative view": torch._neg_view(plain),
        "negative part": torch.ones(1, dtype=torch.complex64).conj().imag,
        "zeros without memory": torch._efficientzerotensor((3,)),
        "subclass": plain.as_subclass(Own),
    }


@pytest.mark.parametrize("kind", other_tensors())
def test_anything_else_is_left_to_python(kind: str) -> None:
    assert not can_read(other_tensors()[kind])


def test_gradients_are_copied_or_named() -> None:
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.zeros(3, 4)) for _ in range(5)]
    flat, counts = torch.full((5, 12), 7.0), [12, 12, 12, 11, 12]
    for param in params:
        param.grad = torch.randn(3, 4)
    params[1].grad = torch.randn(4, 3).t()
    params[4].grad = None
    places = [row.data_ptr() for row in flat]
    left = _core.copy_gradients(params, places, counts, dtype_code(flat))
    assert left == ([1, 3, 4] if exported() else [0, 1, 2, 3, 4])
    for number, row in enumerate(flat):
        grad = params[number].grad
        copied = torch.full((12,), 7.0) if number in left else grad.flatten()
        assert torch.equal(row, copied)
    assert _core.copy_gradients(params[:1], places[:1], [12], dtype_code(flat.half())) == [0]
    with pytest.raises(ValueError, match="lists of different lengths"):
        _core.copy_gradients(params, places[:1], counts, 0)
