"""``paddle-rbt calibrate``."""

from __future__ import annotations

from collections import Counter

from rich.console import RenderableType

from paddle_rbt_plugin.calibrate import Calibration, calibrate
from paddle_rbt_plugin.cli.output import Output, make_table, titled
from paddle_rbt_plugin.plan.files import check_writable, save_file
from paddle_rbt_plugin.spelling import spell_seconds


def calibrate_devices(output: Output, path: str | None, processes: int | None, timeout: int, rounds: int) -> None:
    """Measures the devices at hand, prints what they reach, and writes their profile to a file if there is one."""
    if path is not None:
        check_writable(path)  # before a minute of work
    with output.progress("measuring") as report:
        found = calibrate(processes, timeout, report, rounds)
    if path is not None:
        save_file(path, found.text)
    for reason, count in Counter(s["skipped"] for s in found.samples if "skipped" in s).items():
        output.note(f"{count} left out: {reason}")
    result = {
        "cluster": found.profile,
        "fit_errors": dict(found.fit.errors),
        "measurements": list(found.samples),
        "output": path,
    }
    output.result(result, _table(found), f"written to {path}" if path else found.text)


def _table(found: Calibration) -> RenderableType:
    fit = found.fit
    rows = [(f"matrix products, {p}", f"{rate / 1e12:.3g} TFLOP/s", "product") for p, rate in fit.flops.items()]
    rows += [
        ("optimizer", f"{fit.bandwidth / 1e9:.3g} GB/s", ""),
        ("other ops bound by memory", f"{fit.bandwidth * fit.memory_share / 1e9:.3g} GB/s", "traffic"),
        ("launch of an op, static program", spell_seconds(fit.program_launch_s), ""),
        ("launch of an op, dygraph", spell_seconds(fit.eager_launch_s), ""),
    ]
    if fit.link:
        rows += [
            ("link between devices", f"{fit.link.bandwidth / 1e9:.3g} GB/s", "collective"),
            ("start of a collective", spell_seconds(fit.link.launch_s), ""),
            ("step of a collective", spell_seconds(fit.link.step_s), ""),
        ]
    table = make_table("", "reached", "typical error", right=("reached", "typical error"))
    for what, reached, kind in rows:
        table.add_row(what, reached, f"{fit.errors[kind]:.0%}" if kind else "")
    return titled(f"{found.profile['devices_per_machine']} x {found.profile['device']}, all at the same time", table)
