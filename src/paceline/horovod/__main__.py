"""`python -m paceline.horovod train.py`: run a script in which `import horovod` finds Paceline.

For other launchers: `torchrun --nproc-per-node 4 -m paceline.horovod train.py`.
"""

from __future__ import annotations

import os
import runpy
import sys

from paceline.horovod import install


def main() -> None:
    """Run the script or, after -m, the module of the command line as `__main__`."""
    install()
    words = sys.argv[1:]
    if not words:
        sys.exit("usage: python -m paceline.horovod SCRIPT [ARGUMENTS]... | -m MODULE ...")
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
