"""Token ids of sentences, by the ``tokenizers`` package and a model's ``tokenizer.json``."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fadex.core.checks import check_int


class TokenBatch(NamedTuple):
    """Padded sentences on the host.

    Attributes:
      ids: int32 ``[B, N]``, padded on the right with the padding token.
      mask: bool ``[B, N]``, true where a token stands.
      token_types: int32 ``[B, N]``.
    """

    ids: np.ndarray
    mask: np.ndarray
    token_types: np.ndarray


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Sentences to token ids; made by :func:`load_tokenizer`.

    Attributes:
      backend: the ``tokenizers.Tokenizer``, with neither truncation nor padding of its own.
      max_length: tokens of the longest sentence, the special ones included; what is longer is
        cut, and keeps its closing special tokens.
      pad_id: the padding token.
      multiple: sentences are padded to a multiple of it, so that few lengths, hence few
        programs, occur.
    """

    backend: Any
    max_length: int
    pad_id: int
    multiple: int

    def __post_init__(self):
        special = self.backend.num_special_tokens_to_add(is_pair=False)
        check_int("max_length", self.max_length, minimum=special + 1)
        check_int("multiple", self.multiple, minimum=1)

    def tokens(self, sentences: Sequence[str]) -> list[np.ndarray]:
        """Ids of each sentence, int32, cut to ``max_length`` and not padded.

        Raises:
          TypeError: one string instead of a list of them, or something that is no string.
          ValueError: a string that is no Unicode text (it holds half of a surrogate pair).
        """
        if isinstance(sentences, (str, bytes)):
            raise TypeError(f"sentences: expected a list of strings, got {sentences!r}")
        sentences = list(sentences)
        for i, sentence in enumerate(sentences):
            if not isinstance(sentence, str):
                raise TypeError(f"sentences[{i}]: expected a string, got {sentence!r}")
            try:
                sentence.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"sentences[{i}]: is no Unicode text: {error}") from None
        return [self._cut(encoded) for encoded in self.backend.encode_batch(sentences)]

    def _cut(self, encoded: Any) -> np.ndarray:
        ids = np.array(encoded.ids, np.int32)
        if len(ids) <= self.max_length:
            return ids
        inside = np.flatnonzero(np.array(encoded.special_tokens_mask) == 0)
        closing = len(ids) - 1 - inside[-1]
        return np.concatenate([ids[: self.max_length - closing], ids[len(ids) - closing :]])

    def __call__(self, sentences: Sequence[str], *, rows: int | None = None) -> TokenBatch:
        """Tokenize and pad sentences.

        Args:
          sentences: ``B`` strings, the empty one included.
          rows: rows of the result, at least ``B``; further ones are padding alone.
        """
        return self.pad(self.tokens(sentences), rows=rows)

    def pad(self, tokens: Sequence[np.ndarray], *, rows: int | None = None) -> TokenBatch:
        """Stack what :meth:`tokens` returned, padded to a multiple of ``self.multiple``."""
        rows = len(tokens) if rows is None else check_int("rows", rows, minimum=len(tokens))
        longest = max(map(len, tokens), default=1)
        length = min(longest + -longest % self.multiple, self.max_length)
        ids = np.full((rows, length), self.pad_id, np.int32)
        mask = np.zeros((rows, length), bool)
        for i, row in enumerate(tokens):
            ids[i, : len(row)] = row
            mask[i, : len(row)] = True
        return TokenBatch(ids, mask, np.zeros_like(ids))


def load_tokenizer(
    folder: str | os.PathLike[str], *, max_length: int | None = None, multiple: int = 32
) -> Tokenizer:
    """The tokenizer of a model's folder.

    Args:
      folder: holds ``tokenizer.json``, and perhaps ``sentence_bert_config.json``.
      max_length: tokens of the longest sentence; default ``max_seq_length`` of
        ``sentence_bert_config.json``, else 512. (``tokenizer.json`` may name a shorter one,
        which sentence-transformers overrides, and so do we.)
      multiple: see :class:`Tokenizer`.

    Raises:
      ImportError: no ``tokenizers`` package.
      FileNotFoundError: no ``tokenizer.json``.
      ValueError: a file that is damaged, or a ``max_length`` without room for the special tokens.
    """
    path = Path(folder).expanduser() / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"folder: no tokenizer at {str(path)!r}")
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise ImportError(
            f"reading {str(path)!r} needs the tokenizers package: pip install 'fadex-jax[data]'"
        ) from error
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the package raises the bare class
        raise ValueError(f"folder: {str(path)!r} is not a sound tokenizer: {error}") from error
    if max_length is None:
        max_length = _max_length(path.with_name("sentence_bert_config.json"))
    padding = backend.padding
    backend.no_padding()
    backend.no_truncation()
    pad_id = padding["pad_id"] if padding else backend.token_to_id("[PAD]") or 0
    return Tokenizer(backend, max_length, pad_id, multiple)


def _max_length(path: Path) -> int:
    if not path.is_file():
        return 512
    try:
        return int(json.loads(path.read_text())["max_seq_length"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"folder: {str(path)!r} has no max_seq_length ({error!r})") from error
