"""`shoal.tune` is a package and is called like a function."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys

import pytest


def test_it_can_be_called_and_has_names() -> None:
    import shoal.tune.trial  # which binds the package's name in shoal again

    assert callable(shoal.tune) and "max_epochs" in inspect.signature(shoal.tune).parameters
    assert shoal.tune.Trial is shoal.tune.trial.Trial
    for name in shoal.tune.__all__:
        assert getattr(shoal.tune, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        shoal.tune.nothing  # noqa: B018


def test_names_load_when_they_are_used() -> None:
    script = (
        "import sys, shoal.tune; assert 'torch' not in sys.modules; shoal.tune.Trial; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_help_shows_the_call_and_its_arguments() -> None:
    import shoal

    text = pydoc.plain(pydoc.render_doc(shoal.tune))
    assert "shoal.tune(make_job, space=None, *, metric='val_loss'" in text and "max_epochs: The longest" in text
