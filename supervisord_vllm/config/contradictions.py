"""What cannot be true together, one line each, with the fix.

Every check takes the merged and typed file and reports ``(path of the key, problem; fix)``; the caller adds file and
line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePath

from supervisord_vllm.config import arguments
from supervisord_vllm.config.errors import did_you_mean
from supervisord_vllm.config.schema import KINDS, PolicyFile
from supervisord_vllm.config.tomlfile import KeyPath
from supervisord_vllm.config.values import VERBS
from supervisord_vllm.core.diagnosis import Kind
from supervisord_vllm.core.levers import BATCHED_TOKENS, LEVERS, NUM_SEQS, UTILIZATION, WEIGHTS

Problem = tuple[KeyPath, str]

LAUNCHERS = frozenset(
    {"docker", "podman", "nerdctl", "kubectl", "ssh", "srun", "salloc", "sbatch", "systemd-run", "machinectl", "crictl"}
)
"""Programs that start what they run somewhere else, so that it would not be our descendant."""

_WRAPPERS = frozenset(
    {"sudo", "doas", "env", "nice", "ionice", "nohup", "setsid", "numactl", "taskset", "stdbuf", "timeout"}
)


def contradictions(file: PolicyFile, folder: Path) -> Iterator[Problem]:
    """All of them. ``folder`` is where vLLM will look for relative paths.

    Raises:
        ConfigError: where vLLM's own YAML file behind ``--config`` cannot be read.
    """
    yield from _command(file)
    yield from _environment(file.engine.env)
    yield from _arguments(file, folder)
    yield from _overrides(file)
    yield from _couplings(file)
    yield from _proof(file)
    address = file.http.address
    if address is not None and address[1] == file.engine.port:
        yield ("http", "listen"), f'port {address[1]} is the engine\'s; give another one, or "" for none'


def _command(file: PolicyFile) -> Iterator[Problem]:
    names = [PurePath(word).name for word in file.engine.command]
    inspected = names if names[0] in _WRAPPERS else names[:1]
    for index, name in enumerate(inspected):
        if name in LAUNCHERS:
            fix = "run vllm-supervise where vLLM runs and name vLLM's own command"
            yield ("engine", "command", index), f"{name} starts the engine out of our reach (not our descendant); {fix}"
            return


def _environment(env: dict[str, str]) -> Iterator[Problem]:
    for name in env:
        if (problem := environment_problem(name)) is not None:
            yield ("engine", "env", name), problem


def environment_problem(name: str) -> str | None:
    """Why a variable may not be given to the engine, or ``None``."""
    if name.startswith("SUPERVISE_"):
        return "names that begin with SUPERVISE_ are vllm-supervise's own; remove it"
    if name == "SPT_NOENV":
        return "vllm-supervise sets it itself, to recognise its processes; remove it"
    return None


def _arguments(file: PolicyFile, folder: Path) -> Iterator[Problem]:
    ladder = {rung.lever for rung in file.ladder}
    engine = file.engine
    for key, words in (("command", engine.command[1:]), ("args", engine.args)):
        for found in arguments.meant(words):
            if key == "command" and not found.spelling.startswith("--"):
                continue  # the words of an interpreter, such as `python -q -m vllm`
            index = found.index + (key == "command")
            if (fix := _fix(found.meaning, ladder, declared_method=engine.quantization is not None)) is not None:
                yield ("engine", key, index), f"{found.spelling} {fix}"
        for path, line, found in arguments.behind_yaml(words, folder):
            if (fix := _fix(found.meaning, ladder, declared_method=engine.quantization is not None)) is not None:
                yield ("engine", key), f"{path}:{line}: {found.spelling} {fix}"
    if "VLLM_CPU_KVCACHE_SPACE" in engine.env and UTILIZATION in ladder:
        fix = "remove the variable, or the rung of gpu-memory-utilization"
        yield (
            ("engine", "env", "VLLM_CPU_KVCACHE_SPACE"),
            f"fixes the KV cache, so that moving the utilization does nothing; {fix}",
        )


def _fix(meaning: str, ladder: set[str], *, declared_method: bool) -> str | None:
    """What is wrong with a word of the arguments, or ``None`` where it may stay."""
    key = meaning.replace("_", "-")
    if meaning in LEVERS:
        return f"is a lever (a knob that the policy may move); write {key} under [levers] instead"
    if meaning in {arguments.HOST, arguments.PORT, arguments.MODEL}:
        return f"belongs to the policy; write {key} under [engine] instead"
    if meaning == arguments.QUANTIZATION and (WEIGHTS in ladder or declared_method):
        return "goes with the weights, which the policy may change; write quantization under [engine] instead"
    if meaning == arguments.KV_BYTES and UTILIZATION in ladder:
        return "switches the utilization off; remove it, or the rung of gpu-memory-utilization, which it makes useless"
    return None


def _overrides(file: PolicyFile) -> Iterator[Problem]:
    for name, override in file.policy.items():
        if name not in KINDS:
            yield ("policy", name), f"is no kind of failure; {did_you_mean(name, KINDS)}"
            continue
        levers = [word for word in override.remedies or () if word not in VERBS]
        if KINDS[name] is Kind.UNKNOWN and levers:
            problem = (
                "a failure that is not understood never changes the configuration; use same-again, wait and stop only"
            )
            yield ("policy", name, "remedies"), problem


def _proof(file: PolicyFile) -> Iterator[Problem]:
    proof, length = file.proof, file.levers.max_model_len
    if proof.prompt_tokens is not None and length is not None and proof.prompt_tokens + proof.output_tokens > length:
        both = f"{proof.prompt_tokens} and output-tokens ({proof.output_tokens})"
        yield ("proof", "prompt-tokens"), f"{both} are more than max-model-len ({length}); lower one of them"


def _couplings(file: PolicyFile) -> Iterator[Problem]:
    seqs, tokens = file.levers.max_num_seqs, file.levers.max_num_batched_tokens
    if seqs is not None and tokens is not None and seqs > tokens:
        more = f"{seqs} is more than {BATCHED_TOKENS.replace('_', '-')} ({tokens}), which vLLM refuses; lower it"
        yield ("levers", NUM_SEQS.replace("_", "-")), more
    backoff = file.restart.backoff
    if {"first", "max"} <= backoff.model_fields_set and backoff.max < backoff.first:
        yield ("restart", "backoff", "max"), f"{backoff.max} is shorter than first ({backoff.first}); raise it"
