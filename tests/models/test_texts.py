"""Text in other encodings, directories without a tokenizer: errors that name the file, and no network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_ldt.data.texts import BYTE_ORDER_MARK, load_tokenizer, read_text
from ds_ldt.errors import ConfigError

WORDS = "Grüße aus Köln,\nzwei Zeilen\n"


@pytest.mark.parametrize(
    "content",
    [
        WORDS.encode(),
        WORDS.encode("utf-8-sig"),
        (2 * BYTE_ORDER_MARK + WORDS).encode(),
        WORDS.replace("\n", "\r\n").encode("utf-8-sig"),
        WORDS.replace("\n", "\r").encode(),
    ],
    ids=["plain", "marked", "marked twice", "windows", "old mac"],
)
def test_S75_marks_and_line_ends_are_no_part_of_a_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "my.txt").write_bytes(content)
    assert read_text(tmp_path / "my.txt") == WORDS


@pytest.mark.parametrize(
    "content, found",
    [
        (WORDS.encode("latin-1"), "byte 2 is 0xfc, which is no UTF-8 there"),
        (b"a" * 100_000 + "ß".encode("cp1252"), "byte 100000 is 0xdf"),
        (WORDS.encode()[:3], "byte 2 is 0xc3"),
        (WORDS.encode("utf-16"), "begins with the mark of UTF-16"),
        (b"\xfe\xff" + WORDS.encode("utf-16-be"), "begins with the mark of UTF-16"),
        (WORDS.encode("utf-32"), "begins with the mark of UTF-32"),
        ("plain".encode("utf-16-le"), "byte 1 is zero"),
        (b"\x1f\x8b\x08\x00", "is an archive, a document or a picture"),
        (b"", "holds no text (0 bytes)"),
        (b"\xef\xbb\xbf", "holds no text (3 bytes)"),
        (b" \n\t\n", "holds no text (4 bytes)"),
    ],
    ids=["latin-1", "far in", "cut", "utf-16", "big end", "utf-32", "no mark", "gzip", "empty", "mark", "blank"],
)
def test_S75_what_is_no_text_in_utf8_is_refused_with_file_and_place(
    tmp_path: Path, content: bytes, found: str
) -> None:
    path = tmp_path / "my.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_text(path, setting="--text")
    message = str(raised.value)
    assert f'--text: found "{path}", which {found}' in message
    assert "Fix: " in message
    assert ("iconv" in message) == ("holds no text" not in found and "archive" not in found)


@pytest.mark.parametrize("name, found", [("", "Is a directory"), ("none.txt", "No such file"), ("a\0b", "null byte")])
def test_S75_a_text_that_cannot_be_read_is_named(tmp_path: Path, name: str, found: str) -> None:
    with pytest.raises(ConfigError, match=r"--eval_text: found .*which cannot be read: ") as raised:
        read_text(f"{tmp_path}/{name}", setting="--eval_text")
    assert found in str(raised.value)


@pytest.mark.parametrize(
    "make, found",
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text("{}"), "is no directory"),
        (lambda path: path.mkdir(), "holds no tokenizer: none of tokenizer.json"),
        (
            lambda path: (path.mkdir(), (path / "tokenizer.json").write_text("{")),
            "holds a tokenizer that transformers refuses: ",
        ),
    ],
    ids=["missing", "a file", "empty", "damaged"],
)
@pytest.mark.parametrize("name", ["layers", "edge/layers"])
def test_S64_a_directory_without_a_tokenizer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, make: object, found: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(exist_ok=True)
    assert callable(make)
    make(Path(name))
    with pytest.raises(ConfigError) as raised:
        load_tokenizer(name, setting="--tokenizer")
    assert f'--tokenizer: found "{name}", which {found}' in str(raised.value)


def test_S64_code_that_comes_with_a_tokenizer_is_refused_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "y")
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "mine.py").write_text("raise SystemExit('the code ran')\n")
    with pytest.raises(ConfigError, match="holds a tokenizer that transformers refuses: .*custom code"):
        load_tokenizer(tmp_path)
    assert asked == []
