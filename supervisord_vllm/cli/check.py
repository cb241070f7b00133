"""``check``: what a policy means, without starting anything."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from supervisord_vllm.cli.policyfile import ConfigOption, SetOption, settings_of
from supervisord_vllm.exitcodes import ExitCode

if TYPE_CHECKING:
    from supervisord_vllm.config import Settings


def check(
    config: ConfigOption,
    assignments: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    host: Annotated[bool, typer.Option("--host", help="Judge this machine too, as `run` and `preflight` do.")] = False,
) -> None:
    """Validate a policy file; show the resolved command line, the levers with bounds and origin, and the remedies per
    kind.

    Judges the file only, unless --host is given. Ends with 78 where the policy, or with --host this machine, is not
    fit.
    """
    settings = settings_of(config, assignments, as_json=as_json)
    findings = _findings(settings) if host else None
    report = report_of(settings)
    if findings is not None:
        report["host"] = findings
        report["ok"] = not any(finding["severity"] == "error" for finding in findings)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(_lines(report)))
    if not report["ok"]:
        raise typer.Exit(ExitCode.CONFIGURATION)


def report_of(settings: Settings) -> dict[str, Any]:
    """What ``--json`` prints: schema, ok, name, argv (secrets redacted), url, levers, remedies, proof, origins,
    warnings, folders.
    """
    from supervisord_vllm.engine.command import command_line
    from supervisord_vllm.redaction import Redactor

    redactor = Redactor(settings.secrets)
    return {
        "schema": 1,
        "ok": True,
        "name": settings.name,
        "config": str(settings.path),
        "act": settings.act,
        "argv": list(redactor.argv(command_line(settings.engine, settings.policy.declared))),
        "env": redactor.env(settings.engine.env),
        "url": settings.engine.url,
        "state_dir": str(settings.state_dir),
        "runtime_dir": str(settings.runtime_dir),
        "levers": _levers(settings),
        "planned": {
            "after_s": settings.policy.step_up_ns // 10**9,
            "windows": [str(window) for window in settings.policy.windows],
            "per_day": settings.policy.planned_per_day,
            "recycle": "planned-recycle" in settings.policy.allow,
        },
        "remedies": _remedies(settings),
        "proof": _proof(settings),
        "origins": dict(settings.origins),
        "warnings": [redactor.text(warning) for warning in settings.warnings],
    }


def _levers(settings: Settings) -> dict[str, dict[str, Any]]:
    """Every lever that is declared or may move: value, origin, and how far and how it moves."""
    from supervisord_vllm.core.levers import LEVERS, WEIGHTS, value_to_json

    policy, origins = settings.policy, settings.origins
    levers: dict[str, dict[str, Any]] = {}
    for name in LEVERS:
        value, rung = policy.declared.get(name), policy.rung(name)
        if value is None and rung is None:
            continue
        key = "engine.model" if name == WEIGHTS else f"levers.{name.replace('_', '-')}"
        lever: dict[str, Any] = {
            "declared": None if value is None else value_to_json(name, value),
            "origin": origins.get(key, "default"),
            "movable": rung is not None,
        }
        if rung is not None:
            index = policy.ladder.index(rung)
            lever["rung"] = index + 1
            for part in ("min", "max", "step", "factor"):
                bound = getattr(rung, part)
                if bound is not None:
                    lever[part] = value_to_json(name, bound) if part != "factor" else bound
                    lever[f"{part}_origin"] = origins.get(f"ladder[{index}].{part}", "default")
            if rung.use:
                lever["use"] = [value_to_json(name, choice) for choice in rung.use]
        levers[name] = lever
    return levers


def _remedies(settings: Settings) -> dict[str, list[str]]:
    from supervisord_vllm.core.diagnosis import Kind
    from supervisord_vllm.core.remedies import remedies_for

    return {kind.value: list(remedies_for(kind, settings.policy)) for kind in Kind if kind is not Kind.NONE}


def _proof(settings: Settings) -> dict[str, Any]:
    """What the proof of a launch will send; ``at_most`` where vLLM's own number of sequences may lower it."""
    from supervisord_vllm.core.levers import BATCHED_TOKENS, NUM_SEQS
    from supervisord_vllm.core.proof import burst_of
    from supervisord_vllm.core.state import Launch

    policy, proof = settings.policy, settings.proof
    burst = burst_of(policy, Launch(1, policy.declared, policy.declared, 0))
    known = {
        "requests": proof.concurrency is not None or NUM_SEQS in policy.declared,
        "prompt_tokens": proof.prompt_tokens is not None or BATCHED_TOKENS in policy.declared,
    }
    return {
        "canary": proof.canary,
        "burst": None
        if burst is None
        else {
            "requests": burst.requests,
            "prompt_tokens": burst.prompt_tokens if known["prompt_tokens"] else None,
            "output_tokens": burst.output_tokens,
            "at_most": not known["requests"],
            "max_s": proof.burst_max.seconds,
        },
        "soak_s": proof.soak.seconds,
        "soak_memory": proof.soak_memory,
    }


def _proven(proof: dict[str, Any]) -> list[str]:
    """The proof for a person, one line a part."""
    served = "what answers" if proof["canary"] == "auto" else proof["canary"]
    burst, memory = proof["burst"], "memory is judged" if proof["soak_memory"] else "memory is not judged"
    lines = [f"  canary    one token of {served}"]
    if burst is not None:
        count = f"{'at most ' if burst['at_most'] else ''}{burst['requests']}"
        prompt = f"about {burst['prompt_tokens']}" if burst["prompt_tokens"] else "as many as fill one step together"
        lines += [
            f"  burst     {count} requests at once, prompt tokens: {prompt}, output tokens: {burst['output_tokens']}",
            f"            {burst['max_s']:g} s at most; real traffic goes first",
        ]
    return [*lines, f"  soak      {proof['soak_s']:g} s, {memory}"]


def _findings(settings: Settings) -> list[dict[str, Any]]:
    from supervisord_vllm.host.preflight import examine
    from supervisord_vllm.redaction import Redactor, printable

    redactor = Redactor(settings.secrets)
    return [
        {"severity": one.severity, "subject": one.subject, "text": printable(redactor.text(one.text))}
        for one in examine(settings)
    ]


def _lines(report: dict[str, Any]) -> list[str]:
    import shlex

    from supervisord_vllm.core.levers import LEVERS

    lines = [f"{report['config']}: {'good' if report['ok'] else 'not fit for this machine'}"]
    lines += [
        f"  name      {report['name']}",
        f"  state     {report['state_dir']}",
        f"  socket    {report['runtime_dir']}/control.sock",
    ]
    if not report["act"]:
        lines.append("  act       false: says what it would do, and does not do it")
    lines += ["", "launch 1", f"  {shlex.join(report['argv'])}", f"  answers at {report['url']}", "", "levers"]
    for name, lever in report["levers"].items():
        lines.append(f"  {name:<28} {_declared(lever)}  [{lever['origin']}]")
        if lever["movable"]:
            lines.append(f"  {'':<28} rung {lever['rung']}: {_reach(lever)}")
    lines += ["", "proof of a launch", *_proven(report["proof"])]
    lines += ["", "remedies, in order (a lever in parentheses has no rung in the ladder and is skipped)"]
    movable = {name for name, lever in report["levers"].items() if lever["movable"]}
    for kind, words in report["remedies"].items():
        shown = [f"({word})" if word in LEVERS and word not in movable else word for word in words]
        lines.append(f"  {kind:<22} {', '.join(shown) or 'none'}")
    lines += ["", "planned changes", f"  {_planned(report['planned'])}"]
    for title, key in (("warnings", "warnings"), ("this machine", "host")):
        entries = report.get(key) or []
        if entries:
            lines += ["", title]
            lines += [f"  {entry if isinstance(entry, str) else _finding(entry)}" for entry in entries]
    return lines


def _planned(planned: dict[str, Any]) -> str:
    """When they may begin, and what time it is on the clock that the windows are read on."""
    import time

    from supervisord_vllm.config.units import Duration

    if planned["per_day"] == 0:
        return "never (planned-per-day = 0)"
    windows = " or ".join(planned["windows"])
    when = f"within {windows} local time (now {time.strftime('%H:%M')})" if windows else "at a quiet moment"
    recycle = "; the same again before memory that creeps is used up" if planned["recycle"] else ""
    after = Duration(planned["after_s"] * 10**9)
    return f"a step up after {after} of serving, {when}; at most {planned['per_day']} planned restarts a day{recycle}"


def _finding(entry: dict[str, Any]) -> str:
    return f"{entry['severity']}: {entry['subject']}: {entry['text']}"


def _declared(lever: dict[str, Any]) -> str:
    value = lever["declared"]
    if value is None:
        return "vLLM's default"
    return _shown(value)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return f"{value['model']} ({value['quantization']})" if value["quantization"] else str(value["model"])
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _reach(lever: dict[str, Any]) -> str:
    parts = []
    if "min" in lever:
        parts.append(f"{_shown(lever['min'])} to {_shown(lever['max'])}")
    if "step" in lever:
        parts.append(f"blind steps of {_shown(lever['step'])}")
    if "factor" in lever:
        parts.append(f"blind steps by the factor {lever['factor']:g}")
    if "use" in lever:
        parts.append("or ".join(("", *(f"{_shown(choice)} " for choice in lever["use"]))).strip())
    return ", ".join(parts) or "may be turned on"
