"""A TorchX component: one role, which runs `paceline run` with its workers and servers.

    torchx run -s local_cwd torchx_component.py:paceline -n 2 --script train.py -- --steps 100
    torchx run -s slurm --dryrun torchx_component.py:paceline -n 8 --script train.py

TorchX starts one process on one machine, and Paceline the rest there. TorchX does not see single
workers, so it neither counts nor restarts them; that is Paceline's work. For several nodes of Slurm
use `paceline run --on slurm`.
"""

# Without `from __future__ import annotations`: TorchX reads the types themselves.
import sys

from torchx import specs


def paceline(
    *script_args: str,
    script: str,
    n: int = 2,
    servers: int = 0,
    pace: str = "",
    image: str = "",
    cpu: int = 2,
    memory: int = 4096,
) -> specs.AppDef:
    """Train with Paceline.

    Args:
        script_args: arguments of the script
        script: path of the script
        n: number of workers
        servers: number of parameter servers
        pace: such as ssp:3; default: that of the script
        image: image or directory, as the scheduler reads it
        cpu: cores for all processes together
        memory: MB for all processes together
    """
    options = ["-n", str(n), "-s", str(servers), *([f"--pace={pace}"] if pace else [])]
    role = specs.Role(
        name="paceline",
        image=image,
        entrypoint=sys.executable,
        args=["-m", "paceline", "run", *options, script, *script_args],
        resource=specs.Resource(cpu=cpu, gpu=0, memMB=memory),
        max_retries=3,
        retry_policy=specs.RetryPolicy.APPLICATION,
    )
    return specs.AppDef(name="paceline", roles=[role])
