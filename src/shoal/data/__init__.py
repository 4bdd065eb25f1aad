"""Data sets, kept once on a device for all members that read them."""

from __future__ import annotations

from shoal.data.pool import Pool, View
from shoal.data.rows import Rows
from shoal.data.source import Source, TensorSource

__all__ = ["Pool", "Rows", "Source", "TensorSource", "View"]
