"""Process 1 of a test host: changes what the host sees of this machine, then waits for its end.

It is started in new namespaces. The host ends with process 1: the kernel then kills every process
of the host. Process 1 ends with its stdin, which the test holds, so a killed test leaves nothing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys


def main() -> None:
    wanted = json.loads(sys.stdin.buffer.raw.readline())
    socket.sethostname(wanted["name"])
    for path in ("/run", "/dev/shm"):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=True)
    subprocess.run(["mount", "-t", "sysfs", "sysfs", "/sys"], check=True)  # its own interfaces
    for source, target in wanted["files"].items():
        subprocess.run(["mount", "--bind", source, target], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    signal.signal(signal.SIGCHLD, reap)  # process 1 inherits the children of processes that ended
    print("ready", flush=True)
    while os.read(0, 1024):
        pass


def reap(number: int, frame: object) -> None:
    del number, frame
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main()
