"""The log file of a run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger("areal")


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Log records of the run, and the traceback that ends it, go into a file; warnings to stderr too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers = [handler, logging.lastResort] if logging.lastResort else [handler]
    packages = [logging.getLogger(name) for name in ("areal", "archon")]
    for package in packages:
        package.setLevel(logging.INFO)
        for destination in handlers:
            package.addHandler(destination)
    try:
        yield
    except BaseException:
        handler.handle(
            logger.makeRecord(logger.name, logging.CRITICAL, __file__, 0, "the run ended early", (), sys.exc_info())
        )
        raise
    finally:
        for package in packages:
            for destination in handlers:
                package.removeHandler(destination)
        handler.close()
