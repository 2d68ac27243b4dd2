"""The program of a worker of `pl.ray.run`: gets the function, calls it, gives back the result.

Ray's serialisation is used here as in every worker of Ray: the bytes come from the actor on this
node, over a socket of this user, and were made by the process that called `pl.ray.run`.
"""

from __future__ import annotations

from typing import Any

from paceline.errors import UsageError
from paceline.launcher.engines.ray.connection import import_ray
from paceline.launcher.engines.ray.node_actor import SOCKET_VARIABLE, fetch_function, send_result
from paceline.runtime.config import inherited_environ
from paceline.runtime.job import joined, rank, shutdown


def main() -> None:
    """Call the function with its arguments; raises what it raises."""
    environ = inherited_environ()
    name = environ.get(SOCKET_VARIABLE)
    if name is None:
        raise UsageError("this program is for pl.ray.run, which starts it on the nodes of Ray")
    cloudpickle = import_ray().cloudpickle
    function, args = _load(cloudpickle, fetch_function(name))
    value = function(*args)
    job = joined()
    number = int(environ.get("RANK", "0")) if job is None else rank()
    shutdown()  # a checkpoint that is being written is complete then
    saved = None if job is None or job.last_checkpoint is None else str(job.last_checkpoint)
    try:
        data = cloudpickle.dumps((value, saved))
    except Exception as error:  # Ray's serialisation raises many kinds
        raise UsageError(
            f"the function returned {type(value).__name__}, which Ray cannot ship ({error}); return"
            " values that can be pickled"
        ) from None
    send_result(name, number, data)


def _load(cloudpickle: Any, data: bytes) -> tuple[Any, tuple[Any, ...]]:
    try:
        function, args = cloudpickle.loads(data)
    except Exception as error:  # the same
        raise UsageError(
            f"the function cannot be loaded on this node ({type(error).__name__}: {error}); install"
            " what it imports there, or ship your modules with `ray job submit --working-dir`"
        ) from None
    return function, args


if __name__ == "__main__":
    main()
