"""What the tests with real databases share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integrations.postgres import server


@pytest.fixture(params=["sqlite", "journal", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An address of an empty Optuna storage of each kind."""
    if request.param == "postgresql":
        with server() as address:
            yield address
    else:
        yield f"{request.param}:///{tmp_path}/study.{request.param}"
