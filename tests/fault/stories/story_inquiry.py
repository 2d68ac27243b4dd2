"""What the coordinator and the job's directory say about a running job."""

from __future__ import annotations

from pathlib import Path

from paceline.control.client.operator import Operator
from paceline.control.operator_messages import Status
from paceline.control.transport.auth import load_secret
from paceline.errors import PacelineError
from paceline.launcher.job_directory import directories
from paceline.launcher.job_registry import JobFacts, read_facts


def facts(runtime: Path) -> JobFacts | None:
    """Return what is written down about the only job that uses this directory."""
    found = [read_facts(path) for path in directories(runtime)]
    return next((facts for facts in found if facts is not None), None)


def status(runtime: Path) -> Status | None:
    """Ask the coordinator; None while it cannot be asked."""
    job = facts(runtime)
    if job is None:
        return None
    try:
        secret = load_secret(job.secret_file)
        operator = Operator.connect(job.coordinator, secret, job.job_id, timeout_s=2.0)
        try:
            return operator.status(timeout_s=2.0)
        finally:
            operator.close()
    except (PacelineError, OSError):
        return None


def is_complete(runtime: Path, workers: int, servers: int) -> bool:
    """Say whether the job has all its members and copies, and nothing is changing."""
    told = status(runtime)
    if told is None or told.membership is None or told.degraded or told.not_adopted:
        return False
    there = told.membership
    return len(there.workers) == workers and len(there.servers) == servers
