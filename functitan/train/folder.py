"""The run folder: config.json, metrics.jsonl, TensorBoard events, params.safetensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from functitan.checkpoint import save_params, write_text
from functitan.errors import ConfigError

CONFIG, METRICS, PARAMS = "config.json", "metrics.jsonl", "params.safetensors"


class RunFolder:
    """Owns the open files of one run; a context manager.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        # Imported here: it takes a second, and only a run that trains writes events.
        from torch.utils.tensorboard import SummaryWriter

        self.path = path
        self._rows = (path / METRICS).open("x", encoding="utf-8")
        self._events = SummaryWriter(str(path))

    @classmethod
    def create(cls, wanted: str | None, name: str) -> RunFolder:
        """A new folder: the wanted one, or ``out/<name>``, ``out/<name>-2``, ... when none is asked for.

        Raises:
            ConfigError: the wanted folder holds a run, or cannot be made.
        """
        path = Path("out", name) if wanted is None else Path(wanted)
        number = 1
        while wanted is None and path.exists():
            number += 1
            path = Path("out", f"{name}-{number}")
        taken = [file for file in (CONFIG, METRICS, PARAMS) if (path / file).exists()]
        if taken:
            raise ConfigError(
                f"the run folder {path} holds a run already ({', '.join(taken)}). Choose another with "
                "--set run.dir=..., or remove it."
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            return cls(path)
        except OSError as error:
            raise ConfigError(f"the run folder {path} cannot be made: {error}. Set run.dir.") from error

    def config(self, settings: Mapping[str, Any]) -> None:
        """Write config.json."""
        write_text(self.path / CONFIG, json.dumps(settings, indent=2) + "\n")

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row of metrics, to the file as one whole line and to TensorBoard."""
        numbers = {k: v if math.isfinite(v) else str(v) for k, v in values.items()}
        # JSON has no NaN; a string keeps the row readable by every parser.
        self._rows.write(json.dumps({"step": step, **numbers}) + "\n")
        self._rows.flush()
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text to TensorBoard."""
        self._events.add_text(name, text, step)

    def params(self, params: Any) -> None:
        """Write params.safetensors."""
        save_params(self.path / PARAMS, params)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *failure: object) -> None:
        self._rows.close()
        self._events.close()


class NoFolder:
    """What the other processes of a job have in place of the first one's run folder: nothing is written."""

    path = Path()

    def config(self, settings: Mapping[str, Any]) -> None: ...

    def row(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def params(self, params: Any) -> None: ...

    def __enter__(self) -> NoFolder:
        return self

    def __exit__(self, *failure: object) -> None: ...
