"""The cache's logger, and the switch `CUTE_ATTN_LOG` that makes it visible."""

from __future__ import annotations

import logging
import os
import threading

logger = logging.getLogger("cute_attn.cache")

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_reported: set[str] = set()
_reported_lock = threading.Lock()


def configure_from_environment() -> None:
    """Show the package's log on stderr at the level that `CUTE_ATTN_LOG` names.

    An application that configures logging itself leaves the variable unset.
    """
    wanted = os.environ.get("CUTE_ATTN_LOG", "").strip().lower()
    if not wanted:
        return
    package_logger = logging.getLogger("cute_attn")
    if wanted not in _LEVELS:
        package_logger.warning(
            "CUTE_ATTN_LOG=%s is ignored: choose from %s", wanted, ", ".join(_LEVELS)
        )
        return
    package_logger.setLevel(_LEVELS[wanted])
    if not package_logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        package_logger.addHandler(handler)
        package_logger.propagate = False


def warn_once(topic: str, message: str, *args: object) -> None:
    """Log a warning the first time that this process meets `topic`."""
    with _reported_lock:
        if topic in _reported:
            return
        _reported.add(topic)
    logger.warning(message, *args)


def forget_reports() -> None:
    """Make `warn_once` report every topic again."""
    with _reported_lock:
        _reported.clear()


def _after_fork_in_child() -> None:
    global _reported_lock
    _reported_lock = threading.Lock()  # a thread of the parent may have held the old lock


os.register_at_fork(after_in_child=_after_fork_in_child)
