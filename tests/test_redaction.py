from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisord_vllm.redaction import Redactor, printable, secret_flag, secret_variable, secrets_in

TOKEN = "hf_" + "aB3" * 11


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("vllm serve m --api-key abc --port 1", "vllm serve m --api-key *** --port 1"),
        ("--api-key=abc", "--api-key=***"),
        ("--api_key abc", "--api_key ***"),
        ("--host --hf-token abc", "--host --hf-token ***"),
        ("argv ['--api-key', 'abc', '--port']", "argv ['--api-key', ***, '--port']"),
        ("HF_TOKEN=abc VLLM_API_KEY='d e' x", "HF_TOKEN=*** VLLM_API_KEY=*** x"),
        ("{'AWS_SECRET_ACCESS_KEY': 'abc', 'A': 'b'}", "{'AWS_SECRET_ACCESS_KEY': ***, 'A': 'b'}"),
        ("CMD='HF_TOKEN=abc run'", "CMD='HF_TOKEN=*** run'"),
        ("non-default args: {'api_key': ['a', 'b'], 'port': 1}", "non-default args: {'api_key': ***, 'port': 1}"),
        ("hf_token='abc', x", "hf_token=***, x"),
        ("X-Api-Key: abcd", "X-Api-Key: ***"),
        ("Authorization: Bearer abcdef.123", "Authorization: Bearer ***"),
        (f"got {TOKEN}!", "got ***!"),
        ("key sk-abcdefghij0123456789", "key ***"),
        ("the known top-secret-value here", "the known *** here"),
    ],
)
def test_a_secret_is_masked_by_its_flag_its_variable_its_form_or_its_value(text: str, shown: str) -> None:
    assert Redactor(["top-secret-value"]).text(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "max_num_batched_tokens=8192, max_num_seqs=16, api_key=None, tokenizer='x'",
        "--max-num-batched-tokens 8192 --ssl-keyfile k.pem --tokenizer x",
        "TOKENIZERS_PARALLELISM=false HF_HOME=/x HF_TOKEN_PATH=/run/token",
        "KeyError: 'layers.0.weight'; hf_overrides={} task-sk disk-space",
        "Free memory on device (31.2/79.1 GiB) on startup is less than desired",
        "--api-key --port 1",
    ],
)
def test_what_is_no_secret_stays_readable(text: str) -> None:
    assert Redactor(["abc", "", "8192"]).text(text) == text


def test_a_known_secret_is_found_in_the_forms_in_which_programs_print_it() -> None:
    secret = 'p"a\\ss wörd/+'
    redactor = Redactor([secret])
    for form in (secret, json.dumps(secret), repr(secret), "p%22a%5Css%20w%C3%B6rd/%2B"):
        assert redactor.text(f"x {form} y") in {"x *** y", 'x "***" y', "x '***' y"}, form
    assert "wörd" not in repr(redactor)


def test_a_secret_that_is_no_utf_8_is_found_too() -> None:
    secret = b"secret-\xff-bytes".decode("utf-8", "surrogateescape")
    assert Redactor([secret]).text(f"x {secret}") == "x ***"
    assert Redactor([printable(secret)]).text(printable(f"x {secret}")) == "x ***"


def test_of_two_secrets_the_longer_one_is_masked_whole() -> None:
    assert Redactor(["secret", "secret-and-more"]).text("secret-and-more secret") == "*** ***"


def test_a_command_line_keeps_its_words_but_for_the_values() -> None:
    words = [
        "v",
        "--api-key",
        "k1",
        "k2",
        "-tp",
        "2",
        "--hf-token=abc",
        "--env",
        "HF_TOKEN=abc",
        "--seed",
        "1",
        "topsecret",
    ]
    shown = (
        "v",
        "--api-key",
        "***",
        "***",
        "-tp",
        "2",
        "--hf-token=***",
        "--env",
        "HF_TOKEN=***",
        "--seed",
        "1",
        "***",
    )
    assert Redactor(["topsecret"]).argv(words) == shown


def test_an_environment_keeps_its_names() -> None:
    env = {"HF_TOKEN": "a", "PATH": "/bin", "URL": "http://topsecret@x", "EMPTY_KEY": ""}
    assert Redactor(["topsecret"]).env(env) == {
        "HF_TOKEN": "***",
        "PATH": "/bin",
        "URL": "http://***@x",
        "EMPTY_KEY": "",
    }


def test_secrets_are_collected_from_flags_and_variables() -> None:
    assert secrets_in(["v", "--api-key", "a", "b", "-tp", "2", "--hf-token=c"], {"MY_PASSWORD": "d", "HOME": "e"}) == (
        *("d", "a", "b", "c"),
    )


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "OPENAI_API_KEY", "client_secret", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY"]
)
def test_a_variable_s_name_tells_a_secret(name: str) -> None:
    assert secret_variable(name)


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "HF_HOME", "KEYBOARD", "SSL_KEYFILE", "HF_TOKEN_PATH"]
)
def test_a_variable_that_only_sounds_like_one_does_not(name: str) -> None:
    assert not secret_variable(name)


def test_flags_tell_secrets_in_any_spelling_that_vllm_takes() -> None:
    assert all(
        map(secret_flag, ["--api-key", "--api_key", "--api-k", "--api-ke", "--hf-token", "--ssl-keyfile-password"])
    )
    assert not any(map(secret_flag, ["--api", "--ssl-keyfile", "--max-num-batched-tokens", "-k", "--tokenizer"]))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext é 漢", "plain\ttext é 漢"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x\x1b]8;;http://y\x1b\\z", "xz"),
        ("\x1b(Bx\x1b=y\x1bM", "xy"),
        ("\x9b31mred", "red"),
        ("50%\r100%", "50%\\r100%"),
        ("a\x00b\x08c\x7fd\x85e", "a\\x00b\\x08c\\x7fd\\x85e"),
        ("open \x1b[31", "open \\x1b[31"),
        ("never \x1b]0;ends", "never \\x1b]0;ends"),
        ("evil\u202etxt\u200b\u2066", "evil\\u202etxt\\u200b\\u2066"),
        ("two\nlines", "two\\nlines"),
        (b"bad \xff byte".decode("utf-8", "surrogateescape"), "bad \\xff byte"),
    ],
)
def test_control_characters_are_shown_not_obeyed(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(alphabet=st.characters(), max_size=60))
def test_what_was_made_printable_has_no_control_character_and_can_be_encoded(text: str) -> None:
    shown = printable(text)
    assert not any((ord(char) < 32 and char != "\t") or 0x7F <= ord(char) < 0xA0 for char in shown)
    shown.encode("utf-8")
    assert printable(shown) == shown


@given(st.text(max_size=40), st.text(max_size=40), st.text(alphabet="abc\"\\' =:[]-_", min_size=6, max_size=12))
def test_a_known_secret_is_never_left(before: str, after: str, secret: str) -> None:
    assert secret not in Redactor([secret]).text(before + secret + after) or secret in "***"


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "A",
            "A_",
            "--a",
            "api_key=[",
            "HF_TOKEN=",
            "HF_TOKEN='",
            "\x1b[0",
            "\x1b]",
            "bearer ",
            "hf_",
            "sk-",
            "api-key ",
            " = ",
        ),
        *("--api-key ", "password:", "'", '--api-key="', "topsecre"),
    ],
)
def test_hostile_text_takes_linear_time(piece: str) -> None:
    redactor = Redactor(["topsecret", "topsecond"])

    def seconds(length: int) -> float:
        text = (piece * (length // len(piece) + 1))[:length]
        start = time.process_time()
        redactor.text(printable(text))
        return time.process_time() - start

    assert seconds(200_000) < 2.0, "a quadratic rule needs minutes for this"
