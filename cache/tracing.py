"""The kernel that the compiler is tracing in this thread, known without importing the compiler."""

from __future__ import annotations

import threading


class _ThisThread(threading.local):
    kernel: str | None = None


this_thread = _ThisThread()
