"""What several tests share. A module holds what its name says, and no test."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
PATIENCE = 600.0
"""Seconds after which what a test waits for is taken to hang, however busy the machine is."""
