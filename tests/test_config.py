from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisord_vllm.config import ConfigError, Duration, Settings, load, schema
from supervisord_vllm.config.sources import variable
from supervisord_vllm.core.diagnosis import Kind
from supervisord_vllm.core.levers import LEVERS, Levers, Rung, Weights
from supervisord_vllm.core.policy import SECOND, Backoff, Gate, Override

ROOT = Path(__file__).parent.parent
MINIMAL = 'schema = 1\n[engine]\nmodel = "m"\n'

Load = Callable[..., Settings]


@pytest.fixture
def loaded(tmp_path: Path) -> Load:
    """Load a text as the policy ``qwen.toml``."""

    def load_text(text: str, environ: dict[str, str] | None = None, **flags: object) -> Settings:
        path = tmp_path / "qwen.toml"
        path.write_text(text)
        return load(path, environ={"HOME": "/home/op", **(environ or {})}, flags=flags)

    return load_text


@pytest.fixture
def refused(loaded: Load, tmp_path: Path) -> Callable[..., list[str]]:
    """Load a text that must be refused; its problems without the folder."""

    def refuse(text: str, **more: object) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            loaded(text, **more)
        problems = [problem.replace(f"{tmp_path}/", "") for problem in caught.value.problems]
        assert all(problem.isprintable() for problem in problems), "each problem is one line"
        return problems

    return refuse


def test_schema_and_model_alone_are_a_policy(loaded: Load) -> None:
    settings = loaded(MINIMAL)
    assert settings.name == "qwen"
    assert settings.engine.command == ("vllm", "serve")
    assert settings.engine.url == "http://127.0.0.1:8000"
    assert settings.policy.declared == Levers({"weights": Weights("m")})
    assert settings.policy.ladder == ()
    assert (settings.policy.act, settings.policy.on_give_up, settings.policy.max_launches) == (True, "exit", 12)
    assert settings.policy.gate == Gate()
    assert settings.policy.backoff == Backoff()
    assert settings.policy.soak_ns == 30 * SECOND
    assert settings.http.address == ("127.0.0.1", 9620)
    assert settings.warnings == ()


def test_the_defaults_are_those_of_the_core(loaded: Load) -> None:
    from supervisord_vllm.core.policy import Policy, Proof

    made = loaded(MINIMAL).policy
    plain = Policy("qwen", declared=made.declared, proof=Proof())
    assert made == dataclasses.replace(plain, fingerprint=made.fingerprint, surroundings=made.surroundings)


def test_a_full_policy_reaches_the_core_in_its_units(loaded: Load) -> None:
    policy = loaded(
        MINIMAL
        + """
        [levers]
        gpu-memory-utilization = 0.9
        max-num-seqs = 16
        [[ladder]]
        lever = "gpu-memory-utilization"
        min = 0.7
        max = 0.95
        [[ladder]]
        lever = "max-num-seqs"
        step = 4
        min = 4
        [[ladder]]
        lever = "kv-cache-dtype"
        use = ["fp8"]
        [[ladder]]
        lever = "weights"
        use = [{ model = "small", quantization = "awq" }, "tiny"]
        [policy.oom-runtime]
        remedies = ["gpu-memory-utilization", "same-again", "stop"]
        [policy.kv-no-blocks]
        order = "ladder"
        [restart]
        backoff = { first = "250ms", factor = 3, max = "1h" }
        [allow]
        drop-caches = true
        [serving]
        min-concurrency = 2
        """
    ).policy
    assert policy.declared == Levers({"gpu_memory_utilization": 900, "max_num_seqs": 16, "weights": Weights("m")})
    assert policy.ladder == (
        Rung("gpu_memory_utilization", step=50, min=700, max=950),
        Rung("max_num_seqs", step=4, min=4, max=16),
        Rung("kv_cache_dtype", use=("fp8",)),
        Rung("weights", use=(Weights("small", "awq"), Weights("tiny"))),
    )
    assert policy.overrides == {
        Kind.OOM_RUNTIME: Override(("gpu_memory_utilization", "same-again", "stop")),
        Kind.KV_NO_BLOCKS: Override(None, "ladder"),
    }
    assert policy.backoff == Backoff(SECOND // 4, 3.0, 3600 * SECOND)
    assert policy.allow == {"drop-caches"}
    assert policy.min_concurrency == 2.0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "qwen.toml:1: schema: the file is empty; begin it with `schema = 1` and `[engine]` with `model`"),
        ("schema = 1\n", 'qwen.toml:1: engine: missing; add `[engine]` with `model = "NAME OR PATH"`'),
        (
            "schema = 1\n\n[engine]\n",
            'qwen.toml:3: engine.model: missing; name what is served: `model = "NAME OR PATH"`',
        ),
        ('[engine]\nmodel = "m"\n', "qwen.toml:1: schema: missing; begin the file with `schema = 1`"),
        (MINIMAL.replace("1", "2", 1), "qwen.toml:1: schema: got 2; allowed: 1"),
        (MINIMAL + "prot = 1\n", "qwen.toml:4: engine.prot: unknown key; did you mean port?"),
        (MINIMAL + "act = false\n", "qwen.toml:4: engine.act: unknown key; did you mean act? it stands at the top"),
        ("port = 1\n" + MINIMAL, "qwen.toml:1: port: unknown key; did you mean engine.port?"),
        (
            MINIMAL + "[levers]\nmax_num_seqs = 4\n",
            "qwen.toml:5: levers.max_num_seqs: unknown key; did you mean max-num-seqs?",
        ),
        (
            MINIMAL + '[levers]\nweights = "x"\n',
            "unknown key; the declared weights are [engine] model and quantization",
        ),
        (MINIMAL + "port = 80x\n", "qwen.toml:4: not valid TOML"),
        (MINIMAL + 'port = "80"\n', 'qwen.toml:4: engine.port: got "80"; write a whole number'),
        (MINIMAL + "port = 0\n", "qwen.toml:4: engine.port: got 0; at least 1 is allowed"),
        (MINIMAL + "port = true\n", "qwen.toml:4: engine.port: got true; write a whole number"),
        (MINIMAL + "args = [\n 'a',\n 2]\n", "qwen.toml:4: engine.args: got 2 in the list"),
        (MINIMAL + "env = { A = 5 }\n", 'engine.env: A is no text; put its value in quotes: A = "…"'),
        (MINIMAL + "command = []\n", "engine.command: got []; write the program and its words"),
        (MINIMAL + 'url = "ftp://x"\n', 'engine.url: got "ftp://x"; write http://HOST:PORT'),
        (
            MINIMAL + '[gate]\nwindow = "2 seconds"\n',
            'qwen.toml:5: gate.window: got "2 seconds"; write a duration like "90s"',
        ),
        (MINIMAL + "[gate]\nwindow = 2\n", 'gate.window: got 2; write a duration like "90s", "3m", "1h" or "250ms"'),
        (MINIMAL + '[gate]\nwindow = "0s"\n', 'gate.window: got "0s"; it must be longer than zero'),
        (MINIMAL + '[log]\nkeep-bytes = "4GB"\n', 'log.keep-bytes: got "4GB"; write a size like "4GiB"'),
        (MINIMAL + '[log]\nlevel = "loud"\n', 'log.level: got "loud"; allowed: "debug", "info"'),
        (
            MINIMAL + '[memory]\nsource = "gpu"\n',
            'memory.source: got "gpu"; allowed are "auto", "nvml", "host" and "card:PATH"',
        ),
        (MINIMAL + '[http]\nlisten = "9620"\n', 'http.listen: got "9620"; write "HOST:PORT"'),
        (MINIMAL + "[serving]\nmin-concurrency = nan\n", "serving.min-concurrency: got NaN; "),
        (MINIMAL + "[proof]\nconcurrency = -1\n", "qwen.toml:5: proof.concurrency: got -1; "),
        (MINIMAL + "[proof]\nconcurrency = 2000\n", "qwen.toml:5: proof.concurrency: got 2000; "),
        (MINIMAL + "[proof]\noutput-tokens = 0\n", "qwen.toml:5: proof.output-tokens: got 0; "),
        (MINIMAL + '[proof]\nburst-max = "0s"\n', 'proof.burst-max: got "0s"; it must be longer than zero'),
        (
            MINIMAL + "[levers]\nmax-model-len = 256\n[proof]\nprompt-tokens = 200\n",
            "qwen.toml:7: proof.prompt-tokens: 200 and output-tokens (64) are more than max-model-len (256); lower",
        ),
        (MINIMAL + "[policy.oom]\n", "qwen.toml:4: policy.oom: is no kind of failure; "),
        (
            MINIMAL + "[policy.oom-runtime]\nremedies = ['max-num-seq']\n",
            "neither a lever nor a remedy; did you mean max-num-seqs?",
        ),
        (MINIMAL + "[policy.unknown]\nremedies = ['max-num-seqs']\n", "a failure that is not understood never changes"),
        (MINIMAL + "engine = 1\n[engine.x]\n", "qwen.toml:5: engine"),
        ("schema = 1\nengine = 3\n", "qwen.toml:2: engine: got 3; write a table: [section]"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_place_and_fix(
    refused: Callable[..., list[str]], text: str, problem: str
) -> None:
    assert any(problem in line for line in refused(text)), refused(text)


U = '[[ladder]]\nlever = "gpu-memory-utilization"\n'
S = '[[ladder]]\nlever = "max-num-seqs"\n'


@pytest.mark.parametrize(
    ("levers", "rung", "problem"),
    [
        ("gpu-memory-utilization = 0.9", U, "ladder[0].min: missing; say how far gpu-memory-utilization may go down"),
        ("", U + "min = 0.5", "ladder[0].max: missing, and gpu-memory-utilization is not declared"),
        ("", U + "min = 0.9\nmax = 0.5", "qwen.toml:8: ladder[0].min: 0.900 is above max (0.500)"),
        ("gpu-memory-utilization = 0.5", U + "min = 0.6\nmax = 0.9", "min: 0.600 is above the declared value (0.500)"),
        ("max-num-seqs = 64", S + "min = 4\nmax = 32", "max: 32 is below the declared value (64)"),
        ("max-num-seqs = 64", S + "min = 4\nstep = 0", "step: got 0; a whole number of at least 1 is needed"),
        ("max-num-seqs = 64", S + "min = 4\nstep = -2", "step: got -2; a whole number of at least 1 is needed"),
        ("gpu-memory-utilization = 0.9", U + "min = 0.5\nstep = 0", "step: got 0; a utilization is a fraction above 0"),
        ("max-num-seqs = 64", S + "min = 4\nfactor = 1.0", "factor: got 1.0; a factor lies between 0 and 1"),
        ("max-num-seqs = 64", S + "min = 4\nfactor = 0.0", "factor: got 0.0; a factor lies between 0 and 1"),
        ("max-num-seqs = 64", S + "min = 4\nfactor = nan", "factor: got NaN; a factor lies between 0 and 1"),
        ("max-num-seqs = 64", S + "min = 4\nfactor = 0.5\nstep = 2", "factor: stands beside step; give one of them"),
        ("max-num-seqs = 64", S + "min = 4.5", "min: got 4.5; a whole number"),
        ("max-num-seqs = 64", S + "min = inf", "min: got Infinity; a whole number"),
        ("max-num-seqs = 64", S + "min = 4\n" + S + "min = 4", "ladder[1].lever: max-num-seqs has a rung already"),
        ("", '[[ladder]]\nlever = "swap-space"', 'ladder[0].lever: got "swap-space", which is no lever'),
        ("", '[[ladder]]\nlever = "max_num_seqs"', "which is no lever; did you mean max-num-seqs?"),
        ("", "[[ladder]]\nmin = 1", "qwen.toml:6: ladder[0].lever: missing"),
        ("", '[[ladder]]\nlever = "weights"', "ladder[0].use: missing; say what weights may become"),
        ("", '[[ladder]]\nlever = "weights"\nuse = ["m"]', 'use: "m" is what is declared already'),
        ("", '[[ladder]]\nlever = "weights"\nuse = [{ modle = "x" }]', "use: got"),
        ("", '[[ladder]]\nlever = "kv-cache-dtype"\nuse = [1]', "use: got 1; write a text in quotes"),
        ("", '[[ladder]]\nlever = "enforce-eager"\nmin = 1', "min: enforce-eager is no number; remove min"),
        ("", '[[ladder]]\nlever = "enforce-eager"\nuse = []', "use: enforce-eager is a switch"),
        ("gpu-memory-utilization = 0", "", "qwen.toml:5: levers.gpu-memory-utilization: got 0; a utilization is"),
        ("gpu-memory-utilization = 1.2", "", "got 1.2; a utilization is a fraction above 0 and at most 1"),
        ("gpu-memory-utilization = nan", "", "got NaN; a utilization is"),
        ("gpu-memory-utilization = 0.9125", "", "got 0.9125; at most three decimals are allowed"),
        (
            "max-num-seqs = 64\nmax-num-batched-tokens = 32",
            "",
            "64 is more than max-num-batched-tokens (32), which vLLM",
        ),
        ("max-model-len = -1", "", "levers.max-model-len: got -1; at least 1 is allowed"),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(
    refused: Callable[..., list[str]], levers: str, rung: str, problem: str
) -> None:
    assert any(problem in line for line in refused(f"{MINIMAL}[levers]\n{levers}\n{rung}\n")), problem


def test_all_problems_are_said_at_once_and_a_flood_is_cut(refused: Callable[..., list[str]]) -> None:
    assert len(refused(MINIMAL + "port = 0\nprot = 1\n")) == 2
    flood = refused(MINIMAL + "".join(f"x{n} = 1\n" for n in range(5000)))
    assert len(flood) == 21
    assert flood[-1] == "… and 4980 more"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\x7fELF\x00\x01\xff\xfe", "is not UTF-8 text; this is not a policy file"),
        (b"schema = 1\n\x00\x00", ":2: is a binary file; this is not a policy file"),
        (b"#" * ((1 << 20) + 1), "is larger than 1 MiB; this is not a policy file"),
        (b"x = " + b"[" * 10000, "is nested too deeply"),
        (b"a." * 5000 + b"b = 1", "is nested too deeply"),
        (b"a." * 500000 + b"b = 1", "the line is longer than 16 KiB"),
        (b"a = " + b"9" * 9000, "not valid TOML"),
        (b'schema = 1\n[engine]\nmodel = "m\n', ":3: not valid TOML"),
        (b"schema = 1\nschema = 1\n", ":2: not valid TOML"),
        (b"[engine]\nmodel = 'm'\n[engine]\n", ":3: not valid TOML"),
    ],
)
def test_what_is_no_policy_file_is_refused_in_one_line(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "q.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(path, environ={"HOME": "/"})
    assert str(caught.value).startswith(str(path))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_a_folder_and_a_fifo_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.toml")
    for path, problem in (
        (tmp_path / "none.toml", "cannot be read (No such file or directory)"),
        (tmp_path, "is not a regular file"),
        (tmp_path / "fifo.toml", "is not a regular file"),
        (tmp_path / "nul\0.toml", "cannot be read (not a path)"),
    ):
        with pytest.raises(ConfigError, match=re.escape(problem)):
            load(path, environ={"HOME": "/"})


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "q.toml"
    path.write_text(MINIMAL)
    path.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(PermissionError):
            path.read_bytes()
        with pytest.raises(
            ConfigError, match=r"cannot be read .Permission denied.; give the path of a policy file that"
        ):
            load(path, environ={"HOME": "/"})
    finally:
        if root:
            os.seteuid(0)


def test_later_sources_win_and_every_value_knows_its_origin(loaded: Load, tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d/20-port.toml").write_text("[engine]\nport = 8002\n")
    (tmp_path / "conf.d/10-port.toml").write_text('[engine]\nport = 8001\nhost = "127.0.0.1"\nargs = ["--a"]\n')
    (tmp_path / "conf.d/.hidden.toml").write_text("nonsense")
    (tmp_path / "conf.d/README").write_text("nonsense")
    text = MINIMAL + 'args = ["--b"]\n[levers]\nmax-num-seqs = 8\n[start]\nmax = "2m"\n'
    settings = loaded(
        text,
        {
            "SUPERVISE_LEVERS__MAX_NUM_SEQS": "4",
            "SUPERVISE_RESTART__BACKOFF__FIRST": "1s",
            "SUPERVISE_ENGINE__MODEL": "123",
            "SUPERVISE_ENGINE__ENV": '{ A = "1" }',
            "SUPERVISE_LAUNCH": "not a key",
        },
        **{"start.max": "3m", "act": "false"},
    )
    assert (settings.engine.port, settings.engine.host, settings.engine.args) == (8002, "127.0.0.1", ("--a",))
    assert settings.policy.declared.number("max_num_seqs") == 4
    assert settings.engine.model == "123"
    assert settings.engine.env == {"A": "1"}
    assert settings.policy.backoff == Backoff(first_ns=SECOND)
    assert settings.start.max == Duration(180 * SECOND)
    assert settings.act is False
    assert {key: settings.origins[key].replace(f"{tmp_path}/", "") for key in ORIGINS} == ORIGINS


ORIGINS = {
    "schema": "qwen.toml:1",
    "engine.port": "conf.d/20-port.toml:2",
    "engine.host": "conf.d/10-port.toml:3",
    "engine.args": "conf.d/10-port.toml:4",
    "engine.model": "environment SUPERVISE_ENGINE__MODEL",
    "levers.max-num-seqs": "environment SUPERVISE_LEVERS__MAX_NUM_SEQS",
    "restart.backoff.first": "environment SUPERVISE_RESTART__BACKOFF__FIRST",
    "restart.backoff.max": "default",
    "start.max": "flag --set start.max",
    "act": "flag --set act",
    "state-dir": "default",
}


def test_a_wrong_value_names_the_source_it_came_from(refused: Callable[..., list[str]]) -> None:
    assert refused(MINIMAL, environ={"SUPERVISE_ENGINE__PORT": "http"}) == [
        'environment SUPERVISE_ENGINE__PORT: engine.port: got "http"; write a whole number'
    ]
    assert refused(MINIMAL, environ={"SUPERVISE_ENGINE__PROT": "1"}) == [
        "environment SUPERVISE_ENGINE__PROT: no key of a policy is called so; did you mean SUPERVISE_ENGINE__PORT?"
    ]
    assert refused(MINIMAL, **{"engine.port": "0"}) == [
        "flag --set engine.port: engine.port: got 0; at least 1 is allowed"
    ]
    assert refused(MINIMAL, port="1") == ["flag --set port: unknown key; did you mean engine.port?"]


def test_a_ladder_in_a_drop_in_replaces_the_whole_ladder(loaded: Load, tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d/a.toml").write_text('[[ladder]]\nlever = "enforce-eager"\n')
    settings = loaded(MINIMAL + "[[ladder]]\nlever = 'max-num-seqs'\nmin = 1\nmax = 2\n")
    assert [rung.lever for rung in settings.policy.ladder] == ["enforce_eager"]
    assert settings.origins["ladder[0].lever"] == f"{tmp_path}/conf.d/a.toml:2"
    assert settings.origins["ladder[0].min"] == "default"


def test_folders_come_from_the_policy_systemd_or_xdg(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def dirs(text: str = MINIMAL, **environ: str) -> tuple[str, str]:
        settings = loaded(text, environ)
        return str(settings.state_dir), str(settings.runtime_dir)

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert dirs() == ("/var/lib/vllm-supervise/qwen", "/run/vllm-supervise/qwen")
    assert dirs(STATE_DIRECTORY="/s:/t", RUNTIME_DIRECTORY="/r") == ("/s", "/r")
    assert dirs('state-dir = "~/x"\nruntime-dir = "/y"\n' + MINIMAL, STATE_DIRECTORY="/s") == ("/home/op/x", "/y")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert dirs(XDG_RUNTIME_DIR="/run/user/1000") == (
        "/home/op/.local/state/vllm-supervise/qwen",
        "/run/user/1000/vllm-supervise/qwen",
    )
    assert dirs(XDG_STATE_HOME="/x")[0] == "/x/vllm-supervise/qwen"


def test_a_runtime_folder_that_is_too_long_for_a_socket_is_refused(refused: Callable[..., list[str]]) -> None:
    assert "name a shorter folder" in refused(f'runtime-dir = "/{"x" * 100}"\n{MINIMAL}')[0]


def test_a_file_name_that_cannot_name_an_instance_wants_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a b.toml"
    path.write_text(MINIMAL)
    with pytest.raises(ConfigError, match=r"name: the file's own name \(\"a b\"\) cannot be the instance's; add name"):
        load(path, environ={"HOME": "/"})


@pytest.mark.parametrize(
    ("engine", "url"),
    [
        ("port = 81\n", "http://127.0.0.1:81"),
        ('host = "0.0.0.0"\n', "http://127.0.0.1:8000"),
        ('host = "::"\n', "http://[::1]:8000"),
        ('host = "gpu7"\n', "http://gpu7:8000"),
        ('args = ["--uds", "/run/v.sock"]\n', "unix:/run/v.sock"),
        ('args = ["--ssl-certfile=c.pem"]\n', "https://127.0.0.1:8000"),
        ('url = "https://gpu7:1/base/"\n', "https://gpu7:1/base"),
        ('url = "unix:/run/v.sock"\n', "unix:/run/v.sock"),
    ],
)
def test_the_url_follows_from_the_engine_s_own_flags_unless_given(loaded: Load, engine: str, url: str) -> None:
    assert loaded(MINIMAL + engine).engine.url == url


def test_secrets_come_from_files_and_are_never_shown(loaded: Load, tmp_path: Path) -> None:
    for name, content in (("key", "key-from-file\n"), ("engine.env", '# c\n\nHF_TOKEN="tok-123"\nexport A=b c\n')):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o600)
    settings = loaded(
        MINIMAL
        + 'env-file = "engine.env"\napi-key-file = "credential:key"\nenv = { A = "mine", MY_SECRET = "s3cret-x" }\n',
        {"CREDENTIALS_DIRECTORY": str(tmp_path), "AWS_SECRET_ACCESS_KEY": "inherited-secret"},
    )
    assert settings.engine.env == {"HF_TOKEN": "tok-123", "A": "mine", "MY_SECRET": "s3cret-x"}
    assert settings.engine.api_key == "key-from-file"
    assert {"key-from-file", "tok-123", "s3cret-x", "inherited-secret"} <= set(settings.secrets)
    assert not any(secret in repr(settings) for secret in settings.secrets)
    assert settings.warnings == ()
    (tmp_path / "key").chmod(0o644)
    assert any("api-key-file: every user" in warning for warning in loaded(MINIMAL + 'api-key-file = "key"\n').warnings)


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ('env-file = "none.env"', "engine.env-file: "),
        ('env-file = "bad.env"', "bad.env:2: is no NAME=VALUE line"),
        ('env-file = "ours.env"', "ours.env:1: SUPERVISE_LAUNCH: names that begin with SUPERVISE_"),
        ('api-key-file = "two.key"', "holds more than one line; put the key alone into the file"),
        ('api-key-file = "credential:x"', "needs the environment variable CREDENTIALS_DIRECTORY"),
        ('ca-file = "none.pem"', "is no file; give the certificates"),
        ('env = { SPT_NOENV = "0" }', "engine.env.SPT_NOENV: vllm-supervise sets it itself"),
        ('env = { SUPERVISE_X = "0" }', "engine.env.SUPERVISE_X: names that begin with SUPERVISE_ are"),
    ],
)
def test_a_bad_file_or_variable_of_the_engine_is_refused(
    refused: Callable[..., list[str]], tmp_path: Path, engine: str, problem: str
) -> None:
    (tmp_path / "bad.env").write_text("A=1\nthis is top secret\n")
    (tmp_path / "ours.env").write_text("SUPERVISE_LAUNCH=x\n")
    (tmp_path / "two.key").write_text("a\nb\n")
    problems = refused(MINIMAL + engine + "\n")
    assert any(problem in line for line in problems), problems
    assert "top secret" not in "".join(problems)


def test_the_fingerprint_changes_with_the_wish_and_not_with_bounds_names_or_secrets(loaded: Load) -> None:
    def of(text: str, environ: dict[str, str] | None = None) -> str:
        return loaded(MINIMAL + text, environ).policy.fingerprint

    base = of('args = ["--dtype", "half"]\n')
    for same in (
        'args = ["--dtype", "half"]\nport = 81\n',
        'args = ["--dtype", "half", "--served-model-name", "a", "b"]\n',
        'args = ["--dtype", "half", "--api-key", "x"]\n',
        'args = ["--dtype", "half"]\nenv = { HF_TOKEN = "x" }\n',
        'args = ["--dtype", "half"]\n[[ladder]]\nlever = "enforce-eager"\n',
    ):
        assert of(same) == base, same
    others = [
        of(""),
        of('args = ["--dtype", "float"]\n'),
        of('args = ["--dtype", "half"]\nenv = { A = "x" }\n'),
        of('args = ["--dtype", "half"]\n[levers]\nmax-num-seqs = 2\n'),
        of('args = ["--dtype", "half"]\n[memory]\nsource = "host"\n'),
        of('args = ["--dtype", "half"]\ncommand = ["x"]\n'),
        of('args = ["--dtype", "half"]\nquantization = "awq"\n'),
        of('args = ["--dtype", "half"]\n', {"CUDA_VISIBLE_DEVICES": "1"}),
    ]
    assert len({base, *others}) == len(others) + 1


def test_the_example_loads_and_shows_the_defaults(tmp_path: Path) -> None:
    """Outside engine.model, [levers], [[ladder]], [policy.*] and [pressure] it equals the minimal policy."""
    path = tmp_path / "q.toml"
    path.write_text((ROOT / "config.example.toml").read_text())
    example = load(path, environ={"HOME": "/"})
    model = example.engine.model
    path.write_text(MINIMAL.replace('"m"', f'"{model}"'))
    minimal = load(path, environ={"HOME": "/"})
    unlike = {"policy", "pressure", "origins", "warnings"}
    for field in dataclasses.fields(Settings):
        if field.name not in unlike:
            assert getattr(example, field.name) == getattr(minimal, field.name), field.name
    unlike = {"declared", "ladder", "overrides", "fingerprint", "pressure"}
    for field in dataclasses.fields(example.policy):
        if field.name not in unlike:
            assert getattr(example.policy, field.name) == getattr(minimal.policy, field.name), field.name
    assert len(example.policy.ladder) >= 5


def test_the_example_shows_every_key_in_its_table() -> None:
    shown: set[str] = set()
    table = ""
    for line in (ROOT / "config.example.toml").read_text().splitlines():
        if header := re.match(r"\[\[?([a-z.-]+)\]", line):
            table = header[1].replace("policy.oom-runtime", "policy.KIND") + "."
        elif key := re.match(r"(?:# )?([a-z][a-z0-9-]*) = (.*)", line):
            shown.add(table + key[1])
            shown |= {f"{table}{key[1]}.{inner}" for inner in re.findall(r"[{,] ([a-z]+) = ", key[2])}
    known = {".".join(path) for path, _ in schema.every_key() if path[0] not in {"ladder", "policy"}}
    known |= {f"ladder.{key}" for key in schema.fields(schema.RungTable)}
    known |= {f"policy.KIND.{key}" for key in schema.fields(schema.OverrideTable)}
    assert known <= shown, known - shown


def test_the_commented_values_of_the_example_are_good_too(loaded: Load, tmp_path: Path) -> None:
    text = (ROOT / "config.example.toml").read_text()
    for name in ("engine.env", "api-key", "ca.pem"):
        (tmp_path / name).write_text("A=b")
    settings = loaded(re.sub(r"^# (?=[a-z-]+ = )", "", text, flags=re.MULTILINE))
    assert settings.engine.url == "https://gpu7.example:8000/qwen"
    assert set(settings.policy.declared) == set(LEVERS)


def test_the_example_says_of_each_key_whether_it_is_acted_on(loaded: Load) -> None:
    everything = loaded(
        MINIMAL
        + """
        [pressure]
        ttft-p95 = "5s"
        inter-token-p95 = "100ms"
        queue-p95 = "10s"
        [proof]
        concurrency = 1
        prompt-tokens = 100
        output-tokens = 10
        burst-max = "1m"
        soak-memory = false
        [step-up]
        after = "1s"
        [restart]
        planned-per-day = 1
        [allow]
        expandable-segments = true
        drop-caches = true
        planned-recycle = true
        """
    )
    warned = {
        warning.split(": ")[1].rpartition(".")[2] for warning in everything.warnings if "not act on it" in warning
    }
    assert len(warned) == len(everything.warnings)
    lines = (ROOT / "config.example.toml").read_text().splitlines()
    marked = {
        match[1]
        for line in lines
        if "[not acted on yet]" in line and (match := re.match(r"(?:# )?([a-z0-9-]+) = ", line))
    }
    assert marked == warned


def test_a_target_that_no_bucket_can_show_is_warned_of(loaded: Load) -> None:
    warnings = loaded(MINIMAL + '[pressure]\nttft-p95 = "3s"\n').warnings
    assert any("3s is no bound of vLLM's histogram" in warning and "2500ms is" in warning for warning in warnings)


def test_every_plain_key_has_a_variable_of_its_own() -> None:
    names = [variable(key) for key, _ in schema.every_key()]
    assert len(set(names)) == len(names)
    assert "SUPERVISE_ENGINE__ENV_FILE" in names
