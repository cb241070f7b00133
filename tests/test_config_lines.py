from __future__ import annotations

import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from supervisord_vllm.config.tomlfile import KeyPath, read

TEXT = '''\
# comment = 1
top = "a # no comment"   # comment
"quoted key" = 'x'
a.b . "c.d" = 1

[table]   # comment
multi = """
[not.a.header]
key = 1
"quotes"" inside\\"""
end"""""
literal = \'\'\'
'' [x]
\'\'\'
after = 1979-05-27 07:32:00Z
list = [ # comment with ]
  1, "]", # two
  [2, 3],
  { x = 1, y.z = [
    true ] },
]
inline = { one = 1, "t w o" = { three = 3 } }

[[array]]
n = 1
[array.sub]
deep = 1
[[array.inner]]
i = 0
[[array.inner]]
i = 1
[[array]]
n = 2
[array.sub]
deep = 2
[ spaced . out ]
last = 0'''

EXPECTED: dict[KeyPath, int] = {
    ("top",): 2,
    ("quoted key",): 3,
    ("a",): 4,
    ("a", "b", "c.d"): 4,
    ("table",): 6,
    ("table", "multi"): 7,
    ("table", "literal"): 12,
    ("table", "after"): 15,
    ("table", "list"): 16,
    ("table", "list", 0): 17,
    ("table", "list", 1): 17,
    ("table", "list", 2): 18,
    ("table", "list", 2, 1): 18,
    ("table", "list", 3): 19,
    ("table", "list", 3, "x"): 19,
    ("table", "list", 3, "y", "z", 0): 20,
    ("table", "inline", "t w o", "three"): 22,
    ("array", 0): 24,
    ("array", 0, "n"): 25,
    ("array", 0, "sub", "deep"): 27,
    ("array", 0, "inner", 0, "i"): 29,
    ("array", 0, "inner", 1, "i"): 31,
    ("array", 1): 32,
    ("array", 1, "sub", "deep"): 35,
    ("spaced", "out", "last"): 37,
}


def _paths(value: object, at: KeyPath = ()) -> set[KeyPath]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {at} | {path for key, inner in items for path in _paths(inner, (*at, key))}


def test_every_value_of_any_spelling_has_the_line_where_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(TEXT)
    file = read(tmp_path / "x.toml")
    assert {path: file.lines.get(path) for path in EXPECTED} == EXPECTED
    assert set(file.lines) == _paths(file.values) - {()}


def test_windows_line_ends_and_a_byte_order_mark_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    assert {path: read(tmp_path / "x.toml").lines.get(path) for path in EXPECTED} == EXPECTED


_ESCAPE = str.maketrans({'"': '\\"', "\\": "\\\\", "\n": "\\n"})
_SCALARS = st.one_of(
    st.integers(-99, 99).map(str),
    st.booleans().map(lambda flag: str(flag).lower()),
    st.text(alphabet="a]}\"'#=,[{\\ \n", max_size=8).map(lambda text: f'"{text.translate(_ESCAPE)}"'),
    st.text(alphabet='a]}#=,[{\\ \n"', max_size=8).map(lambda text: f"'''{text}'''"),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[\n" + " ,# ]\n".join(items) + " ]"),
        st.lists(inner, max_size=3).map(
            lambda items: "{ " + ", ".join(f"k{n} = {item}" for n, item in enumerate(items)) + " }"
        ),
    ),
    max_leaves=8,
)


@given(st.lists(_VALUES, min_size=1, max_size=5))
def test_the_scanner_finds_exactly_the_values_that_the_parser_finds(values: list[str]) -> None:
    import tempfile

    lines: list[int] = []
    text = ""
    for number, value in enumerate(values):
        lines.append(text.count("\n") + 1)
        text += f"key{number} = {value}\n"
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        found = read(Path(file.name))
    assert set(found.lines) == _paths(found.values) - {()}
    assert [found.lines[(f"key{number}",)] for number in range(len(values))] == lines


def test_a_long_file_is_read_in_linear_time(tmp_path: Path) -> None:
    def seconds(keys: int) -> float:
        (tmp_path / "x.toml").write_text("".join(f"key-{n:06d} = [1]\n" for n in range(keys)))
        start = time.process_time()
        read(tmp_path / "x.toml")
        return time.process_time() - start

    small, large = min(seconds(2_000) for _ in range(3)), min(seconds(16_000) for _ in range(2))
    assert large < small * 8 * 4, "eight times the text takes about eight times as long"
