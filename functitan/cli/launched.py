"""The flag ``--nproc`` of commands: the same command line, as several processes."""

from __future__ import annotations

import os
import sys


def started(nproc: int) -> bool:
    """Start this command line as so many processes, and wait for them; False in one of them, which goes on.

    Raises:
        ConfigError: less than one process.
        LaunchError: a process failed.
    """
    from functitan.errors import ConfigError

    if "FUNCTITAN_LAUNCHED" in os.environ:
        return False
    if nproc < 1:
        raise ConfigError(f"--nproc {nproc} starts no process; write at least 1.")
    from functitan.runtime.launch import launch

    launch(nproc, sys.argv[1:])
    return True
