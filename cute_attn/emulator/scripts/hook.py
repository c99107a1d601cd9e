"""The hook of `CUTE_ATTN_EMULATE=all`: a file in site-packages, see `startup`."""

from __future__ import annotations

import sysconfig
from pathlib import Path

VARIABLE = "CUTE_ATTN_EMULATE"
# Python executes lines of such a file that begin with "import".
HOOK = (
    f'import os; os.environ.get("{VARIABLE}", "").strip() == "all" and '
    '__import__("cute_attn.emulator.scripts.startup", fromlist=["start"]).start()\n'
)


def hook_path() -> Path:
    """The hook's file, in the environment of this Python."""
    return Path(sysconfig.get_path("purelib")) / "cute_attn_emulate.pth"


def install_hook() -> str:
    """Write the hook; return what has been done."""
    hook_path().write_text(HOOK)
    return f"wrote {hook_path()}: Python programs with {VARIABLE}=all run in the emulator"


def remove_hook() -> str:
    """Remove the hook, if it is there; return what has been done."""
    found = hook_path().exists()
    hook_path().unlink(missing_ok=True)
    return f"removed {hook_path()}" if found else f"there is no {hook_path()}"
