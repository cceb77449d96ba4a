"""Start a command as several processes on this machine, with torch's elastic launcher."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from functitan.errors import FunctitanError

#: Set in the processes that :func:`launch` starts: they leave reporting of errors to it.
LAUNCHED = "FUNCTITAN_LAUNCHED"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class LaunchError(FunctitanError):
    """A process of a launched job failed; the message is that process's.

    Attributes:
        code: its exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def launch(processes: int, arguments: Sequence[str]) -> None:
    """Run ``functitan ARGUMENTS`` as so many processes, and wait for them.

    The first process that fails ends all others, and its error is the one that is raised. Interrupting ends all.

    Args:
        processes: how many, on this machine.
        arguments: the command line after ``functitan``.

    Raises:
        LaunchError: a process failed.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The launcher's own reports repeat what is said here.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Two processes of two threads each on two cores are slower than two of one.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[LAUNCHED] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"functitan-{os.getpid()}",
        max_restarts=0,
        monitor_interval=0.1,
    )
    command = [sys.executable, "-m", "functitan.cli.main", *arguments]
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise LaunchError(_text(rank, failure), failure.exitcode) from None
    finally:
        os.environ.pop(LAUNCHED, None)


def _text(rank: int, failure: Any) -> str:
    message = failure.message
    if isinstance(message, dict):
        message = message.get("message", message)
    if isinstance(message, dict):
        message = message.get("message", message)
    return f"process {rank}: {message}"


def report_failure(message: str) -> bool:
    """In a launched process: leave a message for the launcher. False outside one, where it has to be printed."""
    path = os.environ.get(_ERROR_FILE)
    if LAUNCHED not in os.environ or not path:
        return False
    Path(path).write_text(
        json.dumps({"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}),
        encoding="utf-8",
    )
    return True
