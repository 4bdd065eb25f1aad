"""What a measurement says about its code."""

import shutil
import subprocess
import sys
from pathlib import Path

import shoal


def test_the_hash_is_of_the_whole_package(tmp_path: Path) -> None:
    package = tmp_path / "shoal"
    shutil.copytree(Path(shoal.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))

    def source_hash() -> str:
        command = [sys.executable, "-c", "from shoal.evidence.bench.stamp import source_hash; print(source_hash())"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    before = source_hash()
    assert source_hash() == before
    with (package / "training.py").open("a") as file:
        file.write("# changed\n")
    assert source_hash() != before
