"""Horovod's interface on Paceline: change the import, or not even that.

import paceline.horovod.torch as hvd       instead of `import horovod.torch as hvd`
paceline.horovod.install()                 `import horovod.torch` finds this package
paceline run --horovod train.py            the same for a whole job

session, process_sets, reductions, handles, objects, timeline, elastic    for any framework
torch/                                                                    for PyTorch
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from paceline.runtime.config import inherited_environ, set_unless_set
from paceline.runtime.console import say

__version__ = "0.28.1"  # of the interface
_RANKS = {
    **{"RANK": "RANK", "SIZE": "WORLD_SIZE"},
    **{"LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_WORLD_SIZE"},
    **{"CROSS_RANK": "GROUP_RANK", "CROSS_SIZE": "GROUP_WORLD_SIZE"},
}


def install() -> None:
    """Let `import horovod` and its submodules import this package, in this process.

    If Horovod itself is installed, Paceline is used all the same, and says so. If it has been
    imported already, that is an error.
    """
    from paceline.errors import UsageError

    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    loaded = sys.modules.get("horovod")
    if loaded is not None and loaded is not sys.modules[__name__]:
        raise UsageError(
            f"horovod from {getattr(loaded, '__file__', '?')} has been imported already; call"
            " paceline.horovod.install() before that"
        )
    found = importlib.util.find_spec("horovod")
    if found is not None:
        say(f"`import horovod` uses paceline.horovod, not the Horovod in {found.origin}")
    for name, value in _variables(inherited_environ()).items():
        set_unless_set(name, value)
    sys.meta_path.insert(0, _Finder())
    sys.modules["horovod"] = sys.modules[__name__]


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return HOROVOD_RANK and the like, which `horovodrun` sets, from the launcher's variables."""
    return {
        f"HOROVOD_{theirs}": environ[ours] for theirs, ours in _RANKS.items() if ours in environ
    }


class _Finder(MetaPathFinder, Loader):
    """Finds `horovod.x` as `paceline.horovod.x`."""

    def __init__(self) -> None:
        self._own: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if name != "horovod" and not name.startswith("horovod."):
            return None
        ours = "paceline." + name
        try:
            known = importlib.util.find_spec(ours)
        except ModuleNotFoundError:
            known = None
        if known is None:
            raise ModuleNotFoundError(
                f"{name} is not part of Paceline's Horovod interface; the guide `from-horovod`"
                " lists what is",
                name=name,
            )
        return ModuleSpec(name, self, is_package=known.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module("paceline." + spec.name)
        self._own[module.__name__] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Keep the module as it is: it has been imported under its own name."""
        module.__spec__ = self._own[module.__name__]
