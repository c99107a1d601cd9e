"""Run every case on the GPU at hand; write all results to OUT/results.npz.

    cd tests/emulator && python -m silicon.collect OUT [--only TEXT] [--workers N]

It needs numpy and the driver's libcuda. Groups of cases run in processes of their own: a case that
fails or hangs costs its process, which is started again behind it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from . import tensormaps
from .cases import Case, kernel_name, load, module
from .driver import Driver

_GROUP = 40
_PATIENCE = 25  # seconds without a result
_ROOT = Path(__file__).resolve().parents[__spec__.name.count(".")]  # where `-m` finds this


# ---- in a process of its own


def work(numbers: Sequence[int], target: Path) -> None:
    """Run cases, appending (number, result or text of the error) to a file."""
    driver = Driver()
    cases = load()
    with target.open("ab") as file:

        def tell(number: int, what: Any) -> None:
            pickle.dump((number, what), file)
            file.flush()

        for library, group in _assembled(driver, cases, list(numbers), tell):
            tell(-1, None)  # alive
            for place, number in enumerate(group):
                try:
                    output, maps = driver.run(library, kernel_name(place), cases[number])
                except ValueError as error:
                    tell(number, str(error))  # of a tensor map; the GPU is well
                    continue
                except RuntimeError as error:
                    tell(number, str(error))
                    return  # the context is lost
                tell(number, (output, maps))
            driver.unload(library)


def _assembled(
    driver: Driver, cases: Sequence[Case], numbers: list[int], tell: Any
) -> Iterator[tuple[Any, list[int]]]:
    """Modules that the driver loads; a module that it refuses is halved."""
    try:
        yield driver.load(module([cases[n] for n in numbers])), numbers
    except RuntimeError as error:
        if len(numbers) == 1:
            tell(numbers[0], f"not assembled: {error}")
            return
        half = len(numbers) // 2
        for part in (numbers[:half], numbers[half:]):
            yield from _assembled(driver, cases, part, tell)


def _encoded(driver: Driver, tensor_map: tensormaps.TensorMap) -> bytes:
    try:
        return driver.encoder.encode(tensor_map, tensormaps.ADDRESS + tensor_map.offset)
    except ValueError as error:
        return str(error).encode()


def describe(target: Path) -> None:
    """The device, and what the driver makes of tensor maps."""
    driver = Driver()
    maps = [_encoded(driver, tensor_map) for tensor_map in tensormaps.descriptors()]
    target.write_bytes(pickle.dumps((driver.describe(), maps)))


# ---- in the main process


def _child(arguments: Sequence[str], target: Path) -> str:
    """Run this module as a worker. Returns the reason if it failed."""
    command = [sys.executable, "-m", __spec__.name, str(target.parent), *arguments]
    process = subprocess.Popen(
        command, cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    size, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.05)
        now = target.stat().st_size if target.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > _PATIENCE:
            process.kill()
            process.wait()
            return "hangs"
    assert process.stderr is not None
    words = process.stderr.read()[-500:]
    return words or "ended" if process.returncode else ""


def run_group(numbers: Sequence[int], folder: Path) -> dict[int, Any]:
    """Results of a group, by number of the case; a text stands for a failure."""
    found: dict[int, Any] = {}
    left = list(numbers)
    for attempt in range(len(numbers) + 1):
        if not left:
            break
        target = folder / f"{numbers[0]}_{attempt}.pickle"
        words = _child(["--worker", target.name, "--numbers", ",".join(map(str, left))], target)
        before = len(found)
        found.update(_read(target))
        left = [n for n in left if n not in found]
        if left and (words or len(found) == before):
            found[left[0]] = f"no result: {words}"
            left = left[1:]
    return found


def _read(target: Path) -> dict[int, Any]:
    found = {}
    if target.exists():
        with target.open("rb") as file:
            while True:
                try:
                    number, what = pickle.load(file)
                except (EOFError, pickle.UnpicklingError):
                    break
                if number >= 0:
                    found[number] = what
    return found


def save(target: Path, cases: Sequence[Case], results: dict[int, Any], about: Any) -> None:
    """One array of bytes, and an index of it as JSON."""
    device, maps = about
    today = datetime.date.today().isoformat()
    index: dict[str, Any] = {**device, "date": today, "cases": {}, "failures": {}}
    blobs: list[np.ndarray] = []
    for number, case in enumerate(cases):
        result = results.get(number, "not run")
        if number not in results:
            continue
        if isinstance(result, str):
            index["failures"][case.name] = [case.checksum, result]
            continue
        output, encoded = result
        index["cases"][case.name] = [case.checksum, output.nbytes, encoded]
        blobs.append(output)
    index["descriptors"] = [data.hex() if len(data) == 128 else data.decode() for data in maps]
    np.savez_compressed(
        target,
        index=np.frombuffer(json.dumps(index).encode(), np.uint8),
        data=np.concatenate(blobs) if blobs else np.zeros(0, np.uint8),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="cases with this in their name or family")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--numbers", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker == "describe":
        describe(options.out / options.worker)
        return
    if options.worker:
        work([int(n) for n in options.numbers.split(",")], options.out / options.worker)
        return
    start = time.monotonic()
    cases = load()
    chosen = [n for n, c in enumerate(cases) if options.only in c.name or options.only == c.family]
    legal = [n for n in chosen if not cases[n].refused]
    groups = [[n] for n in chosen if cases[n].refused]  # each of these ends its process
    groups += [legal[i : i + _GROUP] for i in range(0, len(legal), _GROUP)]
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        words = _child(["--worker", "describe"], Path(folder) / "describe")
        if not (Path(folder) / "describe").exists():
            raise SystemExit(f"no GPU to run on: {words}")
        about = pickle.loads((Path(folder) / "describe").read_bytes())
        print(about[0], flush=True)
        with ThreadPoolExecutor(options.workers) as pool:
            for found in pool.map(lambda g: run_group(g, Path(folder)), groups):
                results.update(found)
                print(f"{len(results)} of {len(chosen)}, {time.monotonic() - start:.0f} s",
                      flush=True)  # fmt: skip
    for number, result in sorted(results.items()):
        if isinstance(result, str):
            print(f"failed: {cases[number].name}: {result}")
    options.out.mkdir(parents=True, exist_ok=True)
    save(options.out / "results.npz", cases, results, about)


if __name__ == "__main__":
    main()
