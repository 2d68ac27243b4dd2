"""Versions of installed distributions, without importing any of them."""

from __future__ import annotations

import importlib.metadata


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def paceline_version() -> str:
    """Return our own version; a source tree that was never installed has none."""
    return installed_version("paceline") or "(not installed: running from a source tree)"
