"""How long a newcomer waits: the debug recipe from its first step to the saved parameters, as ``make train`` runs it.

python -m benchmarks.train
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

from benchmarks.measure import machine


def main() -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "functitan.cli", "train", "llama3-debug", "--set", f"run.dir={folder}/run"],
            capture_output=True,
            text=True,
            check=True,
        )
        seconds = time.perf_counter() - start
    print("\n".join(line for line in done.stdout.splitlines() if line.startswith(("validation", "speed"))))
    print(f"whole command  {seconds:.0f} s (goal: under 180 s on two idle cores)")


if __name__ == "__main__":
    main()
