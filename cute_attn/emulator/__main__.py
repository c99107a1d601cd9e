"""`python -m cute_attn.emulator script.py`: run a CuTe DSL program without a GPU."""

from __future__ import annotations

import sys

from .scripts.run import main

if __name__ == "__main__":
    sys.exit(main())
