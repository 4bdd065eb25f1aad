"""Data held once, and every member's order over it."""

from __future__ import annotations

from shoal.data.pool import Pool, View
from shoal.data.rows import Rows
from shoal.data.source import Source, TensorSource

__all__ = ["Pool", "Rows", "Source", "TensorSource", "View"]
