"""Chips: peak rates for costs by first principles.

Rates are dense (no structured sparsity), in floating-point operations or bytes per second, one direction.
Capacities are the decimal ones of the data sheets: what more there is physically, driver and allocator need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from functitan.errors import ConfigError, listed, suggest


@dataclass(frozen=True)
class Chip:
    """One accelerator and how it is linked.

    Attributes:
        name: what ``hardware=`` takes.
        flops: matrix operations per second by dtype; a float32 product without reduced precision.
        memory: bytes of HBM.
        bandwidth: HBM bytes per second.
        node: devices that the fast links join.
        fast: bytes per second and direction that a device sends within its node.
        slow: bytes per second and direction that a device sends to other nodes.
        source: where the numbers stand.
    """

    name: str
    flops: Mapping[str, float]
    memory: float
    bandwidth: float
    node: int
    fast: float
    slow: float
    source: str

    def rate(self, dtype: str) -> float:
        """Matrix operations per second in a dtype; one that is not listed runs as float32."""
        if dtype.startswith("float8"):
            dtype = "float8"
        return self.flops.get("bfloat16" if dtype == "float16" else dtype, self.flops["float32"])


#: 400 Gbit/s per device: one ConnectX-7 or equal port each, as the vendors' reference systems have.
_PORT = 400e9 / 8

CHIPS: dict[str, Chip] = {
    c.name: c
    for c in (
        Chip(
            "h100",
            {"bfloat16": 989.4e12, "float8": 1978.9e12, "float32": 66.9e12},
            80e9,
            3.35e12,
            8,
            450e9,
            _PORT,
            "NVIDIA H100 Tensor Core GPU Architecture (peak rates, SXM5); NVIDIA DGX H100 data sheet",
        ),
        Chip(
            "h200",
            {"bfloat16": 989.4e12, "float8": 1978.9e12, "float32": 66.9e12},
            141e9,
            4.8e12,
            8,
            450e9,
            _PORT,
            "NVIDIA H200 Tensor Core GPU data sheet (SXM); NVIDIA DGX H200 data sheet",
        ),
        Chip(
            "b200",
            {"bfloat16": 2250e12, "float8": 4500e12, "float32": 75e12},
            180e9,
            8e12,
            8,
            900e9,
            _PORT,
            "NVIDIA HGX B200 and DGX B200 data sheets, per GPU",
        ),
        Chip(
            "gb200",
            {"bfloat16": 2500e12, "float8": 5000e12, "float32": 80e12},
            186e9,
            8e12,
            72,
            900e9,
            _PORT,
            "NVIDIA GB200 NVL72 data sheet, per GPU",
        ),
        Chip(
            "mi300x",
            {"bfloat16": 1307.4e12, "float8": 2614.9e12, "float32": 163.4e12},
            192e9,
            5.3e12,
            8,
            448e9,
            _PORT,
            "AMD Instinct MI300X data sheet (seven links of 64 GB/s and direction); platform data sheet",
        ),
    )
}


def chip(name: str | Chip) -> Chip:
    """A chip by name.

    Raises:
        ConfigError: no such chip in the table.

    >>> chip("h100").memory
    80000000000.0
    """
    if isinstance(name, Chip):
        return name
    if name.lower() not in CHIPS:
        raise ConfigError(
            f'there is no chip "{name}" in the table; there are {listed(CHIPS)}.'
            f"{suggest(name.lower(), CHIPS)} A chip of your own is a functitan.compiler.hardware.Chip."
        )
    return CHIPS[name.lower()]
