"""The command line: `shoal COMMAND`, also `python -m shoal COMMAND`.

Nothing here imports torch: a command's module is loaded when that command runs, and torch when it is needed.
"""

from shoal.cli.app import main

__all__ = ["main"]
