"""``rehearse``: a policy against a simulated GPU in virtual time, or a real history through a changed policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from supervisord_vllm.cli.policyfile import SetOption, settings_of
from supervisord_vllm.exitcodes import ExitCode

if TYPE_CHECKING:
    from supervisord_vllm.core.decision import Decision
    from supervisord_vllm.core.policy import Policy

DEFAULT = "full-ladder"


def rehearse(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="The policy file.", show_default=False)
    ] = None,
    assignments: SetOption = None,
    scenario: Annotated[
        str | None,
        typer.Option("--scenario", metavar="NAME", help=f"A scenario of --list or a TOML file; default {DEFAULT}."),
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Name the scenarios; needs no policy.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="FILE", help="Another policy file: show both side by side.")
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option("--history", metavar="STORE", help="Put the facts of a real history through this policy."),
    ] = None,
) -> None:
    """Run a policy against a simulated GPU and faults in virtual time, and print the story."""
    if listing:
        _list(as_json=as_json)
        return
    if config is None:
        raise typer.BadParameter("the policy file is missing: give --config FILE, or --list", param_hint="--config")
    if history is not None and (against is not None or scenario is not None):
        raise typer.BadParameter("stands alone: the history is the scenario", param_hint="--history")
    policy = settings_of(config, assignments, as_json=as_json).policy
    if history is not None:
        _replay(policy, history, as_json=as_json)
        return
    other = settings_of(against, assignments, as_json=as_json).policy if against is not None else None
    _play(policy, other, scenario or DEFAULT, (str(config), str(against)), as_json=as_json)


def _list(*, as_json: bool) -> None:
    from supervisord_vllm.simulation.virtual_scenario import packaged, read_scenario

    scenarios = [(name, read_scenario(name).title) for name in packaged()]
    if as_json:
        listed = [{"name": name, "title": title} for name, title in scenarios]
        print(json.dumps({"schema": 1, "scenarios": listed}, indent=2))
        return
    wide = max(len(name) for name, _ in scenarios)
    for name, title in scenarios:
        print(f"{name:<{wide}}  {title}")


def _play(policy: Policy, other: Policy | None, name: str, files: tuple[str, str], *, as_json: bool) -> None:
    from supervisord_vllm.rehearsal.play import Play
    from supervisord_vllm.rehearsal.story import comparison, document, story
    from supervisord_vllm.simulation.card import CardError
    from supervisord_vllm.simulation.virtual_scenario import read_scenario

    try:
        scenario = read_scenario(name)
    except CardError as error:
        typer.echo(f"rehearse: {error}", err=True)
        raise typer.Exit(ExitCode.USAGE) from None
    played = Play(policy, scenario).run()
    if other is None:
        print(json.dumps(document(played), indent=2) if as_json else story(played))
        return
    second = Play(other, scenario).run()
    if as_json:
        pair = {"schema": 1, "policies": list(files), "rehearsals": [document(played), document(second)]}
        print(json.dumps(pair, indent=2))
        return
    print(comparison(played, second, files))


def _replay(policy: Policy, path: Path, *, as_json: bool) -> None:
    """Every run of a store through the policy: what was decided then, and what it would decide."""
    import contextlib

    from supervisord_vllm.core.machine import decide
    from supervisord_vllm.core.state import State
    from supervisord_vllm.replay import replay
    from supervisord_vllm.store import History
    from supervisord_vllm.store.schema import StoreError

    file = path / "history.sqlite3" if path.is_dir() else path
    try:
        store = History.open(file)
        if store is None:
            raise StoreError(f"there is no history at {file}; give a state directory or its history.sqlite3")
        with contextlib.closing(store):
            pairs = [
                (
                    run.run,
                    replay(store, run.run, None, decide, State.initial()),
                    replay(store, run.run, policy, decide, State.initial()),
                )
                for run in store.runs()
            ]
    except StoreError as error:
        typer.echo(f"rehearse: {error}", err=True)
        raise typer.Exit(ExitCode.REFUSED) from None
    if as_json:
        print(json.dumps({"schema": 1, "runs": [_run(*pair) for pair in pairs]}, indent=2))
        return
    print("\n".join(_told(pairs)))


def _run(run: int, then: list[Decision], now: list[Decision]) -> dict[str, object]:
    from supervisord_vllm.core.codec import to_json

    return {
        "run": run,
        "same": [_essence(d) for d in then] == [_essence(d) for d in now],
        "decided": [to_json(decision) for decision in then],
        "would_decide": [to_json(decision) for decision in now],
    }


def _essence(decision: Decision) -> tuple[object, ...]:
    return decision.launch, decision.kind, decision.action, decision.moves


def _told(pairs: list[tuple[int, list[Decision], list[Decision]]]) -> list[str]:
    lines: list[str] = []
    for run, then, now in pairs:
        differs = next(
            (place for place, (a, b) in enumerate(zip(then, now, strict=False)) if _essence(a) != _essence(b)), None
        )
        if differs is None and len(then) == len(now):
            lines.append(f"run {run}: {len(then)} decisions, the same under this policy")
            continue
        place = min(len(then), len(now)) if differs is None else differs
        lines.append(f"run {run}: {len(then)} decisions; the first that differs is number {place + 1}")
        lines.append(f"  then  {then[place].sentence if place < len(then) else 'nothing was decided'}")
        lines.append(f"  now   {now[place].sentence if place < len(now) else 'nothing would be decided'}")
        lines.append("  What follows it is not told: the engine would have lived another life.")
    return lines or ["the history holds no run"]
