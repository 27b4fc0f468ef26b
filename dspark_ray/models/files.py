"""Files that are whole or absent: written under another name, flushed to the disk, renamed."""

import os
import tempfile
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a text file whole; after a failure the file that was there before is still there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
