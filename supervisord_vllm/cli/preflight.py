"""``preflight``: judge this machine before a launch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from supervisord_vllm.cli.policyfile import ConfigOption, SetOption, settings_of
from supervisord_vllm.exitcodes import ExitCode

if TYPE_CHECKING:
    from supervisord_vllm.host.preflight import Report

_VERDICTS = {
    "ok": "ready: a launch as declared can begin.",
    "warning": "usable: what is marked is waited for or worked around.",
    "error": "not ready: what is marked with error must be mended first.",
}


def preflight(
    config: ConfigOption,
    assignments: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Judge this machine before a launch: command, model, folders, ports, and memory with totals, free and holders.

    Starts nothing. Ends with 78 where a launch as declared cannot succeed.
    """
    from supervisord_vllm.host.preflight import inspect
    from supervisord_vllm.redaction import Redactor, printable

    settings = settings_of(config, assignments, as_json=as_json)
    report = inspect(settings)
    if as_json:
        print(json.dumps(report_of(report), indent=2))
    else:
        redactor = Redactor(settings.secrets)
        for finding in report.findings:
            print(f"  {finding.severity:<8} {finding.subject:<13} {printable(redactor.text(finding.what))}")
            if finding.fix:
                print(f"  {'':<8} {'':<13} → {printable(finding.fix)}")
        print(f"{settings.name} is {_VERDICTS[report.severity]}")
    if report.severity == "error":
        raise typer.Exit(ExitCode.CONFIGURATION)


def report_of(report: Report) -> dict[str, Any]:
    """What ``--json`` prints: schema, verdict, findings, devices (bytes)."""
    return {
        "schema": 1,
        "verdict": report.severity,
        "findings": [
            {"severity": one.severity, "subject": one.subject, "what": one.what, "fix": one.fix}
            for one in report.findings
        ],
        "devices": [
            {
                "gpu": device.device,
                "total_bytes": device.total_bytes,
                "free_bytes": device.free_bytes,
                "context_bytes": device.context_bytes,
                "own_bytes": device.own_bytes,
                "holders": [
                    {
                        "pid": holder.pid,
                        "user": holder.user,
                        "command": holder.command,
                        "bytes": holder.memory_bytes,
                        "ours": holder.ours,
                    }
                    for holder in device.holders
                ],
            }
            for device in report.devices
        ],
    }
