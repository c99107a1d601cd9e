"""The capturing process. `common` starts this module with `python -m` and three arguments:
`directory`, `jobs` and `errors`.

`jobs` is the text of a list of (digest, peer, function, options). Each request becomes a file in
the directory, or an entry of `errors`, which is written last.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from . import recording
from .common import write_atomically


def main(directory: str, jobs: str, errors: str) -> None:
    root = Path(directory)
    arch, num_sms = os.environ["CUTE_DSL_ARCH"], int(os.environ["FLASH_ATTENTION_NUM_SMS"])
    recording.patch(arch, num_sms)
    recording.import_without_triton()
    failed: dict[str, str] = {}

    def capture(digest: str, peer: str, function: str, options: Any) -> None:
        try:
            module = importlib.import_module(f".{peer}", __package__)
            recorder = recording.Recorder(module.PACKAGE, arch)
            recorder.run(lambda r: module.FRONT_ENDS[function](r, **dict(options)))
            stored = recorder.stored(lambda compiled: compiled.save(root / "functions"))
            write_atomically(root / "captures" / f"{digest}.json", json.dumps(stored, indent=1))
        except Exception:
            failed[digest] = traceback.format_exc(limit=-12)

    for job in ast.literal_eval(Path(jobs).read_text()):
        capture(*job)
    Path(errors).write_text(json.dumps(failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
