"""Imports a framework when it is first used, and checks that it is a version that was tested."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from paceline.errors import FrameworkMissing

# For each framework: the major version that is tested, and Paceline's extra that installs it.
_TESTED = {
    "keras": ("3", "keras"),
    "tensorflow": ("2", "tensorflow"),
    "jax": ("0", "jax"),
    "lightning": ("2", "lightning"),
    "accelerate": ("1", "transformers"),
    "transformers": ("5", "transformers"),
}


def require(name: str) -> ModuleType:
    """Return a framework's module; FrameworkMissing if there is none, or of another version."""
    major, extra = _TESTED[name]
    install = f"pip install 'paceline[{extra}]'"
    if importlib.util.find_spec(name) is None:
        raise FrameworkMissing(f"paceline.{extra} needs {name}, which is not installed: {install}")
    module = importlib.import_module(name)
    version = str(getattr(module, "__version__", "unknown"))
    if version.split(".")[0] != major:
        raise FrameworkMissing(
            f"{name} {version} is installed, but this Paceline is tested with {name} {major}.x:"
            f" {install}"
        )
    return module
