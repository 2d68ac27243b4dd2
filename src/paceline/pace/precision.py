"""The precisions in which a model can compute, and the dtype of the wire that follows from them.

No torch: the command line imports this.
"""

from __future__ import annotations

from paceline.errors import UsageError
from paceline.grammar import near

PRECISIONS = ("fp32", "bf16", "fp16")

# Gradients have been unscaled before they travel (data_parallel/grad_scaler.py), and what loss
# scaling has saved would be lost on a wire of float16, which ends at 6e-8. bfloat16 has the same 16
# bits and the range of float32.
_WIRE = {"fp32": "fp32", "bf16": "bf16", "fp16": "bf16"}


def wire_dtype(precision: str) -> str:
    """Return how gradients travel between hosts if the script does not say: the one rule for all.

    >>> wire_dtype("fp16")
    'bf16'
    """
    return _WIRE[precision]


def require_precision(text: str) -> str:
    """Return the text if it names a precision; UsageError says which there are."""
    if text in PRECISIONS:
        return text
    hint, all_of_them = near(text, PRECISIONS), ", ".join(PRECISIONS)
    raise UsageError(f"precision {text[:40]!r} is unknown{hint}; choose {all_of_them}")
