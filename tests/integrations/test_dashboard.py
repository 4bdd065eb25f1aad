"""A study of `shoal.tune` in optuna-dashboard, as a person sees it in a browser."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.tune.space import parse
from shoal.tune.trial import Trial

pytest.importorskip("optuna_dashboard", reason="needs optuna-dashboard: pip install optuna-dashboard")
webdriver: Any = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

pytestmark = pytest.mark.slow

BROWSER, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
SPACE = {"lr": ("log", 1e-3, 1e-1), "width": [8, 16]}
X = torch.randn(128, 4, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def make_job(params: dict[str, Any]) -> shoal.Job:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(4, params["width"]), nn.Tanh(), nn.Linear(params["width"], 2))

    return shoal.Job(
        model=network, data=(X[:96], Y[:96]), val=(X[96:], Y[96:]), loss=F.cross_entropy, batch_size=16,
        metrics={"accuracy": accuracy}, hparams={"lr": params["lr"]},
    )  # fmt: skip


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A study that has ended, and of another run a trial that is under way."""
    from shoal.tune.optuna_storage import OptunaStorage

    url = f"sqlite:///{tmp_path}/study.db"
    shoal.tune(make_job, SPACE, metric="accuracy", max_epochs=9, storage=url, study_name="digits", device="cpu")
    with OptunaStorage(url, "digits", mode="max", space=parse(SPACE), run="another") as storage:
        storage.report(Trial(0, {"lr": 0.01, "width": 8}, "running"), 1, 0.625)
    return url


@pytest.fixture
def dashboard(url: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = "import sys; from optuna_dashboard._cli import main; sys.exit(main())"
    arguments = [url, "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(
        [sys.executable, "-c", command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}/dashboard"
    try:
        for _ in range(300):
            assert server.poll() is None, "optuna-dashboard ended"
            try:
                urllib.request.urlopen(address, timeout=5).close()
                break
            except OSError:
                with pytest.raises(subprocess.TimeoutExpired):
                    server.wait(0.2)
        yield address
    finally:
        server.terminate()
        server.wait()


@pytest.fixture
def browser() -> Iterator[Any]:
    if BROWSER is None or DRIVER is None:
        pytest.skip("needs Chromium and its driver: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,2400"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def text_with(browser: Any, address: str, *words: str) -> str:
    """The text of a page, once all of these words are on it."""
    browser.get(address)

    def look(driver: Any) -> str | bool:
        text = str(driver.find_element("tag name", "body").text)
        return text if all(word in text for word in words) else False

    return str(WebDriverWait(browser, 60).until(look, f"{address} does not show {words}"))


def test_trials_pruned_states_and_intermediate_values(url: str, dashboard: str, browser: Any) -> None:
    import optuna

    study = optuna.load_study(study_name="digits", storage=url)
    count = len(study.trials)
    assert text_with(browser, dashboard, "digits", "MAXIMIZE")

    trials = text_with(browser, f"{dashboard}/studies/1/trials", f"{count} Trials", "Trial 0", "Pruned", "Complete")
    assert trials.count("Pruned") >= 5 and "Best Trial" in trials

    longest = max(study.trials, key=lambda trial: len(trial.intermediate_values))
    page = f"{dashboard}/studies/1/trials?numbers={longest.number}"
    shown = text_with(browser, page, f"Trial {longest.number} (trial_id={longest._trial_id})", "Intermediate Values")
    for step, value in longest.intermediate_values.items():
        assert f"{step} {str(value).removesuffix('.0')}" in shown  # as JavaScript writes it
    running = text_with(browser, f"{dashboard}/studies/1/trials?numbers={count - 1}", "Running", "1 0.625")
    assert f"Trial {count - 1} (trial_id={count})" in running

    overview = text_with(
        browser, f"{dashboard}/studies/1", "History", "Hyperparameter Importance", "Intermediate values"
    )
    assert "accuracy" in overview and "Best Trial" in overview
    curves = browser.execute_script("return document.querySelectorAll('.js-plotly-plot .scatterlayer .trace').length")
    assert curves >= count // 2, "the plot of intermediate values has a line for each trial"
    study._storage.remove_session()
    study._storage._backend.engine.dispose()
