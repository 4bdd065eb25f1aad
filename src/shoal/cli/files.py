"""Files that a command will write: checked before the long work, not after it."""

import os
from pathlib import Path


def check_writable(path: Path | None) -> None:
    """Make the folder of a file that will be written; ValueError where it cannot be."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be written ({error.strerror}); name another file") from None
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{str(path)!r} cannot be written; name another file")


def check_picture(path: Path | None) -> None:
    """The same for a picture, whose name says what kind it is."""
    if path is None:
        return
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install 'shoal[plot]'") from None
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lower()[1:] not in kinds:
        raise ValueError(f"{str(path)!r} is no kind of picture; end the name in .png, .pdf or .svg")
    check_writable(path)
