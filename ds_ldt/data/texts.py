"""Text files and tokenizers, for the edge: read from this machine alone, with errors that name the file.

Text is UTF-8. Guessing another encoding would train on the wrong letters without a word.
"""

from __future__ import annotations

import codecs
import os
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ds_ldt.errors import Absent, ConfigError

BYTE_ORDER_MARK = "\ufeff"
_SHOWN = 300
"""Characters of what transformers says."""
_NO_TEXT = ("\x7fELF", "PK\x03", "%PDF", "\x1f\x8b", "\x89PNG", "\xff\xd8\xff")
"""How files begin that are programs, archives, documents and pictures, byte for byte."""

# The mark of UTF-32 begins with that of UTF-16.
_OTHER_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"),
    *("tekken.json", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model"),
)


def read_text(path: str | os.PathLike[str], *, setting: str = "text") -> str:
    """Read a text file in UTF-8. A byte order mark at its beginning is dropped, line ends become line feeds.

    Args:
        path: The file.
        setting: What names it, for errors, e.g. `--text`.

    Raises:
        ConfigError: There is no such file, it is empty, or it is not UTF-8: in another encoding or not text at all.
    """
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise _problem(setting, path, f"cannot be read: {reason}", "a text file", "correct the path") from None
    if content.startswith(tuple(mark.encode("latin-1") for mark in _NO_TEXT)):
        raise _problem(setting, path, "is an archive, a document or a picture", "text in UTF-8", "name a text file")
    for mark, encoding in _OTHER_MARKS:
        if content.startswith(mark):
            raise _not_utf8(setting, path, f"begins with the mark of {encoding}", encoding)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{content[error.start]:02x}, which is no UTF-8 there"
        raise _not_utf8(setting, path, byte, "LATIN1") from None
    if "\0" in text:  # UTF-16 of English text is UTF-8 all the same, with a zero after each letter
        raise _not_utf8(setting, path, f"byte {content.index(0)} is zero, as in UTF-16 or in no text at all", "UTF-16")
    text = text.lstrip(BYTE_ORDER_MARK).replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise _problem(setting, path, f"holds no text ({len(content)} bytes)", "some text", "name another file")
    return text


def load_tokenizer(
    directory: str | os.PathLike[str], *, setting: str = "tokenizer", allow_download: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a directory of this machine; nothing is asked of a network.

    Args:
        directory: Where it is; a directory written by `ds-ldt convert` for the edge holds one.
        setting: What names it, for errors, e.g. `--tokenizer`.
        allow_download: Take it for the name of a model on a hub where there is no such directory.

    Raises:
        ConfigError: There is no such directory, or no tokenizer that can be read in it.
    """
    if not (allow_download and not os.path.lexists(directory)):
        check_directory_with(directory, TOKENIZER_FILES, what="tokenizer", setting=setting)
    try:
        # Left to itself transformers asks on the terminal whether to run code that comes with a tokenizer.
        return AutoTokenizer.from_pretrained(
            os.fspath(directory), local_files_only=not allow_download, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many types here; all mean the same to the user
        raise unreadable(directory, error, what="tokenizer", setting=setting) from error


def check_directory_with(
    directory: str | os.PathLike[str], names: tuple[str, ...], *, what: str, setting: str
) -> None:
    """Check that a directory is here and holds one of some files. Loaders take any other text for a name on a hub.

    Args:
        directory: The directory.
        names: Files, of which one is enough.
        what: What they are of, e.g. `tokenizer`.
        setting: What names the directory, for errors.

    Raises:
        ConfigError: It is not here, or holds none of them.
    """
    path = Path(directory)
    if not path.is_dir():
        there = "is no directory" if os.path.lexists(path) else "does not exist"
    elif not any((path / name).is_file() for name in names):
        there = f"holds no {what}: none of {', '.join(names)}"
    else:
        return
    fix = f"name a directory of this machine that holds the {what}; nothing is downloaded"
    raise _problem(setting, path, there, f"the directory of {_a(what)}", fix)


def unreadable(directory: str | os.PathLike[str], error: Exception, *, what: str, setting: str) -> ConfigError:
    """Return the error for files that transformers refuses, with the beginning of what it says."""
    said = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
    there = f"holds {_a(what)} that transformers refuses: {said}"
    fix = "check its files against those that were published with the model"
    return _problem(setting, directory, there, f"{_a(what)} that can be loaded", fix)


def _a(what: str) -> str:
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"


def _not_utf8(setting: str, path: str | os.PathLike[str], found: str, encoding: str) -> ConfigError:
    fix = f"save it as UTF-8, e.g. iconv -f {encoding} -t UTF-8 OLD > NEW where {encoding} is what it is in"
    return _problem(setting, path, found, "text in UTF-8", fix)


def _problem(setting: str, path: str | os.PathLike[str], found: str, expected: str, fix: str) -> ConfigError:
    return ConfigError.of(setting, found=Absent(f'"{os.fspath(path)}", which {found}'), expected=expected, fix=fix)
