"""From a policy file to `Settings`: read, merge, validate, check, resolve. The only entry is `load`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from supervisord_vllm import places
from supervisord_vllm.config import arguments, ladder, schema, values
from supervisord_vllm.config.complaints import dotted, line, problem_of, refusal
from supervisord_vllm.config.contradictions import contradictions
from supervisord_vllm.config.errors import ConfigError, given
from supervisord_vllm.config.schema import KINDS, PolicyFile
from supervisord_vllm.config.secretfiles import environment_file, located, readable_by_others, secret
from supervisord_vllm.config.settings import Engine, Memory, Settings, fingerprint
from supervisord_vllm.config.sources import Merged, merge
from supervisord_vllm.config.tomlfile import KeyPath
from supervisord_vllm.config.units import Duration
from supervisord_vllm.config.warnings import warnings
from supervisord_vllm.core.levers import Levers, Rung
from supervisord_vllm.core.policy import SECOND, Backoff, Gate, Override, Policy, Pressure, Proof
from supervisord_vllm.redaction import secrets_in

_LONGEST_SOCKET = 107
"""Bytes of a Unix socket's path that Linux takes."""


def load(path: str | Path, *, environ: Mapping[str, str], flags: Mapping[str, object] | None = None) -> Settings:
    """The settings of a policy file.

    ``environ`` is the daemon's environment: its ``SUPERVISE_*`` variables set keys, systemd's and XDG's name
    directories. ``flags`` maps dotted keys to a text or a value and wins over everything.

    Raises:
        ConfigError: with one line per problem, ``FILE:LINE: key: problem; fix``.
    """
    path = Path(path)
    merged = merge(path, environ, flags or {})
    try:
        file = PolicyFile.model_validate(merged.values)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = (line(merged, detail["loc"], problem_of(detail)) for detail in details)
        raise refusal(problems, len(details)) from None
    return _Resolution(merged, file, environ).settings()


class _Resolution:
    """One pass over a typed file: collects problems, then gives the settings."""

    def __init__(self, merged: Merged, file: PolicyFile, environ: Mapping[str, str]) -> None:
        self._merged = merged
        self._file = file
        self._environ = environ
        self._folder = merged.path.parent
        self._problems: list[str] = []
        self._origins = dict(_origins(merged, file))

    def settings(self) -> Settings:
        file = self._file
        name = self._name()
        engine = self._engine()
        try:
            for key, problem in contradictions(file, engine.working_dir or Path.cwd()):
                self._report(key, problem)
        except ConfigError as error:
            self._report(("engine", "args"), str(error))
        declared = ladder.declared(file)
        rungs = ladder.rungs(file, declared, self._report)
        memory = self._memory()
        state, runtime = self._directories(name)
        if self._problems:
            raise refusal(self._problems, len(self._problems))
        source = file.memory.source
        devices = self._environ.get("CUDA_VISIBLE_DEVICES")
        hashed = fingerprint(engine, declared, source, devices)
        surroundings = fingerprint(engine, None, source, devices)
        return Settings(
            path=self._merged.path,
            name=name,
            act=file.act,
            on_give_up=file.on_give_up,
            state_dir=state,
            runtime_dir=runtime,
            engine=engine,
            policy=replace(_policy(file, name, declared, rungs, hashed), surroundings=surroundings),
            memory=memory,
            pressure=file.pressure,
            proof=file.proof,
            step_up=file.step_up,
            restart=file.restart,
            gate=file.gate,
            start=file.start,
            hang=file.hang,
            serving=file.serving,
            http=file.http,
            log=file.log,
            poll=file.poll,
            stop=file.stop,
            systemd=file.systemd,
            origins=self._origins,
            warnings=tuple(
                f"{self._merged.place(key)}: {dotted(key)}: {text}"
                for key, text in warnings(file, engine, readable=self._readable(engine))
            ),
            secrets=self._secrets(engine),
        )

    def _report(self, key: KeyPath, problem: str) -> None:
        self._problems.append(line(self._merged, key, problem))

    def _name(self) -> str:
        if self._file.name is not None:
            return self._file.name
        stem = self._merged.path.stem
        try:
            return values.name(stem)
        except ValueError:
            self._report(("name",), f"the file's own name ({given(stem)}) cannot be the instance's; add name = \"…\"")
            return "unnamed"

    def _path(self, *key: str) -> Path | None:
        value: Any = self._file
        for part in key:
            value = getattr(value, part.replace("-", "_"))
        if value is None:
            return None
        try:
            return located(value, self._folder, self._environ)
        except ValueError as error:
            self._report(key, str(error))
            return None

    def _engine(self) -> Engine:
        table = self._file.engine
        env_file, key_file = self._path("engine", "env-file"), self._path("engine", "api-key-file")
        env: dict[str, str] = {}
        key = None
        try:
            env = environment_file(env_file) if env_file else {}
        except ConfigError as error:
            for problem in error.problems:
                self._report(("engine", "env-file"), problem)
        try:
            key = secret(key_file, "a file that holds the API key") if key_file else None
        except ConfigError as error:
            self._report(("engine", "api-key-file"), str(error))
        env |= table.env
        ca_file = self._path("engine", "ca-file")
        if ca_file is not None and not ca_file.is_file():
            self._report(("engine", "ca-file"), f"{ca_file} is no file; give the certificates that sign the engine's")
        return Engine(
            command=tuple(table.command),
            model=table.model,
            args=tuple(table.args),
            port=table.port,
            url=table.url or self._url(),
            host=table.host,
            quantization=table.quantization,
            env=env,
            working_dir=self._path("engine", "working-dir"),
            verify_tls=table.verify_tls,
            ca_file=ca_file,
            api_key=arguments.value(table.args, "--api-key") or env.get("VLLM_API_KEY") or key,
            api_key_file=key_file,
            env_file=env_file,
        )

    def _url(self) -> str:
        """Where the engine answers, from its own flags."""
        table = self._file.engine
        if (socket := arguments.value(table.args, "--uds")) is not None:
            return f"unix:{socket}"
        scheme = "https" if arguments.value(table.args, "--ssl-certfile") is not None else "http"
        host = {None: "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(table.host, table.host)  # noqa: S104  # any address
        return f"{scheme}://[{host}]:{table.port}" if ":" in str(host) else f"{scheme}://{host}:{table.port}"

    def _memory(self) -> Memory:
        table = self._file.memory
        kind, _, name = table.source.partition(":")
        card = None
        if name:
            try:
                card = located(name, self._folder, self._environ)
            except ValueError as error:
                self._report(("memory", "source"), str(error))
        return Memory(kind, card, table.timeout.seconds)

    def _directories(self, name: str) -> tuple[Path, Path]:
        state = self._path("state-dir")
        if state is None:
            try:
                state, self._origins["state-dir"] = places.state_dir(name, self._environ)
            except ValueError as error:
                self._report(("state-dir",), f'{error}; add state-dir = "/PATH" at the top of the file')
                state = Path()
        runtime = self._path("runtime-dir")
        if runtime is None:
            found = places.runtime_dir(name, self._environ)
            runtime, self._origins["runtime-dir"] = found or (state / "run", "default")
        length = len(bytes(runtime / places.SOCKET))
        if length > _LONGEST_SOCKET:
            problem = f"{runtime}/{places.SOCKET} has {length} bytes and a socket's path may have {_LONGEST_SOCKET}"
            self._report(("runtime-dir",), f"{problem}; name a shorter folder")
        return state, runtime

    def _readable(self, engine: Engine) -> tuple[KeyPath, ...]:
        files: tuple[tuple[KeyPath, Path | None], ...] = (
            (("engine", "env-file"), engine.env_file),
            (("engine", "api-key-file"), engine.api_key_file),
        )
        return tuple(key for key, path in files if path is not None and readable_by_others(path))

    def _secrets(self, engine: Engine) -> tuple[str, ...]:
        known = secrets_in([*engine.command, *engine.args], {**self._environ, **engine.env})
        return tuple(dict.fromkeys([*known, *([engine.api_key] if engine.api_key else [])]))


def _policy(file: PolicyFile, name: str, declared: Levers, rungs: tuple[Rung, ...], hashed: str) -> Policy:
    restart, gate, pressure = file.restart, file.gate, file.pressure
    allow = [key for key in schema.fields(schema.AllowTable) if getattr(file.allow, key.replace("-", "_"))]
    return Policy(
        name=name,
        declared=declared,
        ladder=rungs,
        overrides={
            KINDS[kind]: Override(None if table.remedies is None else tuple(table.remedies), table.order)
            for kind, table in file.policy.items()
        },
        act=file.act,
        on_give_up=file.on_give_up,
        budget=restart.budget,
        window_ns=restart.window.ns,
        max_launches=restart.max_launches,
        backoff=Backoff(restart.backoff.first.ns, restart.backoff.factor, restart.backoff.max.ns),
        gate=Gate(gate.window.ns, gate.patience.ns, gate.deadline.ns),
        start_max_ns=file.start.max.ns,
        stop_deadline_ns=_stop_deadline_ns(file),
        soak_ns=file.proof.soak.ns,
        proof=_proof(file),
        step_up_ns=file.step_up.after.ns,
        windows=file.step_up.window,
        planned_per_day=restart.planned_per_day,
        drain_ns=file.stop.drain.ns,
        pressure=Pressure(
            _ns(pressure.ttft_p95),
            _ns(pressure.inter_token_p95),
            _ns(pressure.queue_p95),
            pressure.first_restart_cost.ns,
        ),
        min_concurrency=file.serving.min_concurrency,
        allow=frozenset(allow),
        fingerprint=hashed,
    )


def _proof(file: PolicyFile) -> Proof:
    proof = file.proof
    fixed = "VLLM_CPU_KVCACHE_SPACE" in file.engine.env or any(
        word.meaning == arguments.KV_BYTES for word in arguments.meant(file.engine.args)
    )
    return Proof(
        concurrency=proof.concurrency,
        prompt_tokens=proof.prompt_tokens,
        output_tokens=proof.output_tokens,
        burst_max_ns=proof.burst_max.ns,
        memory=proof.soak_memory,
        bounded=not fixed,
    )


def _ns(span: Duration | None) -> int | None:
    return None if span is None else span.ns


def _stop_deadline_ns(file: PolicyFile) -> int:
    """Longer than every stage of an end together, reading the last output and a minute included."""
    stop = file.stop
    drain = arguments.value(file.engine.args, "--shutdown-timeout")
    grace = stop.grace.ns
    if drain is not None and drain.isascii() and drain.isdigit() and len(drain) < 8:
        grace = max(grace, (int(drain) + 10) * SECOND)
    return max(180 * SECOND, grace + stop.interrupt.ns + stop.terminate.ns + stop.kill.ns + 60 * SECOND)


def _origins(merged: Merged, file: PolicyFile) -> Iterator[tuple[str, str]]:
    """The origin of every value: given ones by their place, the others ``default``; an absent lever has no value."""
    for path, _ in schema.every_key():
        place = merged.places.get(path)
        if place is not None or path[0] not in {"levers", "ladder", "policy"}:
            yield dotted(path), place or "default"
    for found, where in merged.places.items():
        if found[0] in {"ladder", "policy"} or found[:2] == ("engine", "env"):
            yield dotted(found), where
    for index, rung in enumerate(file.ladder):  # a ladder from the environment has one place for all
        for key in schema.fields(type(rung)):
            inner = ("ladder", index, key)
            yield dotted(inner), merged.place(inner) if getattr(rung, key) is not None else "default"
