"""The report's tables of devices and of operations, as rich renderables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rollyard.watch.devices import DeviceTime, PoolTime, work
from rollyard.watch.report import TokenLedger, Usage

SHOWN: Final = 0.005  # a smaller share is not worth its place


def ledger(tokens: TokenLedger) -> str:
    """Where tokens went, in one line."""
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in tokens.dropped.items())
    parts = [
        f"{tokens.generated:,} generated, {tokens.trained:,} trained",
        f"{sum(tokens.dropped.values()):,} dropped" + (f" ({reasons})" if reasons else ""),
        *([f"{tokens.live:,} live"] if tokens.live else []),
        f"{tokens.recomputed:,} computed again",
    ]
    return ", ".join(parts)


def lags(staleness: Mapping[int, int]) -> str:
    """Share of trained tokens by version lag."""
    whole = sum(staleness.values())
    return ", ".join(f"lag {lag} {tokens / whole:.0%}" for lag, tokens in staleness.items())


def tables(usage: Usage, *, narrow: bool = False) -> list[RenderableType]:
    """What is known of devices and operations; nothing where nothing is. `narrow`: only the columns that say most."""
    found: list[RenderableType] = []
    if usage.devices:
        found += (Text(), _devices(usage.devices, usage.pools, narrow))
    if usage.operations:
        found += (Text(), _operations(usage, narrow))
    return found


def _devices(devices: Sequence[DeviceTime], pools: Iterable[PoolTime], narrow: bool) -> Table:
    """Shares of the time after setup."""
    grid = _grid()
    grid.add_column("device", no_wrap=True)
    grid.add_column("busy", justify="right", no_wrap=True)
    if not narrow:
        grid.add_column("with", ratio=1)
    grid.add_column("waits for", ratio=1)
    grid.add_column("stall", justify="right", no_wrap=True)
    for device in devices:
        stall = f"{device.stall_ns / 1e9:.2f} s" if "engine" in device.roles else ""
        name = f"{device.device} × {device.devices:,}" if device.devices > 1 else device.device
        does = [] if narrow else [_most(work([device]))]
        grid.add_row(name, f"{device.busy_share:.1%}", *does, _most(device.wait_share), stall)
    for name, pool in _several(devices, pools):
        bubbles = f"{_most(pool.wait_share)}; bubbles {pool.bubble_ns / 1e9:.2f} s"
        does = [] if narrow else [_most(work([device for device in devices if pool.role in device.roles]))]
        grid.add_row(f"{pool.devices} × {name}", f"{pool.busy_share:.1%}", *does, bubbles, "", style="bold")
    return grid


def _several(devices: Sequence[DeviceTime], pools: Iterable[PoolTime]) -> Iterator[tuple[str, PoolTime]]:
    """Roles of several devices. Two that the same devices have are one line; a device alone has its own already."""
    found: dict[tuple[str, ...], list[PoolTime]] = {}
    for pool in pools:
        if pool.devices > 1:
            found.setdefault(tuple(device.device for device in devices if pool.role in device.roles), []).append(pool)
    for same in found.values():
        yield "+".join(pool.role for pool in same), same[0]


def _most(shares: Mapping[str, float]) -> str:
    most = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{cause} {share:.1%}" for cause, share in most if share >= SHOWN) or "-"


def _operations(usage: Usage, narrow: bool) -> Table:
    grid = _grid()
    grid.add_column("operation" if narrow else "phase", no_wrap=True)
    if not narrow:
        grid.add_column("operation", no_wrap=True)
    for name in ("bound by", "of device") if narrow else ("FLOPs/byte", "bound by", "seconds", "of device"):
        grid.add_column(name, justify="right", no_wrap=True)
    for row in usage.operations:
        seconds = "-" if row.seconds is None else f"{row.seconds:.2f}"
        share = "-" if row.share is None else f"{row.share:.1%}"
        if narrow:
            grid.add_row(row.operation, row.bound or "-", share)
        else:
            grid.add_row(row.phase, row.operation, f"{row.flops_per_byte:.1f}", row.bound or "-", seconds, share)
    if usage.balance is not None and not narrow:
        grid.add_row("machine", "balance", f"{usage.balance:.1f}", "", "", "", style="bold")
    return grid


def _grid() -> Table:
    return Table(box=None, padding=(0, 1, 0, 0), expand=True, header_style="bold", show_edge=False)
