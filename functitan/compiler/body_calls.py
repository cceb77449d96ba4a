"""The targets of nodes that call lowered bodies: placeholders, for which each backend puts its own."""

from __future__ import annotations

from typing import Any


def call_body(name: str, inputs: list[Any]) -> list[Any]:
    """A node's target: run a lowered body forward. Backends put their own in its place."""
    raise RuntimeError(f"the call of {name} has no backend")


def call_body_backward(name: str, kept: list[Any], saved: list[Any], cotangents: list[Any]) -> list[Any]:
    """A node's target: run a lowered body backward."""
    raise RuntimeError(f"the call of {name} has no backend")


def scan_body(name: str, length: int, inputs: list[Any]) -> list[Any]:
    """A node's target: run a lowered body forward over the leading dim of its xs."""
    raise RuntimeError(f"the scan of {name} has no backend")


def scan_body_backward(name: str, length: int, kept: list[Any], saved: list[Any], cotangents: list[Any]) -> list[Any]:
    """A node's target: run a lowered body backward, last step first."""
    raise RuntimeError(f"the scan of {name} has no backend")


BODY_CALLS = (call_body, call_body_backward, scan_body, scan_body_backward)
