"""Units of figures in device specs: a closed table; what is not in it is no unit.

A file of its own: what reads specs knows no unit by name."""

from __future__ import annotations

from collections.abc import Mapping

_DECIMAL = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}

SIZE = {"B": 1.0} | {f"{key}B": factor for key, factor in (_DECIMAL | _BINARY).items()}
# Bits of a wire by eight; MT/s are transfers of a flash channel, which is eight bits wide: a byte
# each.
RATE = (
    {f"{key}/s": factor for key, factor in SIZE.items()}
    | {f"{key}{bits}": factor / 8 for key, factor in _DECIMAL.items() for bits in ("b/s", "bps")}
    | {"MT/s": 1e6, "GT/s": 1e9}
)
#: Of what a figure may be, its units, and what one of each is in the first of them: bytes, bytes/s,
#: s, FLOP/s, ...
QUANTITIES: Mapping[str, Mapping[str, float]] = {
    "size": SIZE,
    "rate": RATE,
    "time": {"s": 1.0} | _SECONDS,
    "compute": {"FLOPS": 1.0} | {f"{key}FLOPS": factor for key, factor in _DECIMAL.items()},
    "requests": {"IOPS": 1.0, "KIOPS": 1e3, "MIOPS": 1e6},
    "frequency": {"Hz": 1.0, "kHz": 1e3, "MHz": 1e6, "GHz": 1e9},
    "power": {"W": 1.0, "mW": 1e-3, "kW": 1e3},
    "energy of a bit": {"J/bit": 1.0, "nJ/bit": 1e-9, "pJ/bit": 1e-12},
    "price": {"$": 1.0},
    "price of an hour": {"$/h": 1.0},
    "endurance": {"BW": 1.0} | {f"{key}BW": factor for key, factor in _DECIMAL.items()},
    "count": {"1": 1.0},
    "share": {"1": 1.0, "%": 0.01},
    "number below 0": {"1": 1.0},
}
