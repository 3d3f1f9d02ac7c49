"""Tokenizers of SentencePiece: tokenizer.model is read without its library, and becomes our back end."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from skipjoin.model.errors import ModelError

FILE = "tokenizer.model"
SPACE = "\u2581"
# Classes of transformers that give texts the ids of the file. Those of others are shifted, or need code.
_CLASSES = ("LlamaTokenizer", "GemmaTokenizer", "")
_UNIGRAM, _BPE = 1, 2
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
# Kinds of pieces that stand for no text.
_SILENT = (_CONTROL, _UNUSED)
# Taken from the score, which is the logarithm of a probability, of a piece that no text has.
_UNLIKELY = 1e6
_ENDS = {"unk": 40, "bos": 41, "eos": 42, "pad": 43}
_DEFAULTS = {"unk": 0, "bos": 1, "eos": 2, "pad": -1}
# Bound of the work to find merges, a hundred times that of the largest vocabularies.
_MAX_CUTS = 1 << 30
_MAX_BYTES = 1 << 28
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LARGEST_SHIFT = 63


class Piece(NamedTuple):
    text: str
    score: float
    kind: int


class SentencePiece(NamedTuple):
    """Contents of a tokenizer.model file.

    Attributes:
        ends: Ids of the tokens of unknown text, and at the ends of texts, by their names; -1 for none.
        charsmap: Compiled replacements of characters.
        joins_spaces: Whether spaces at the ends of a text are removed, and several are one.
        ends_words: Whether spaces belong to the word before them.
    """

    pieces: tuple[Piece, ...]
    kind: int
    has_bytes: bool
    ends: dict[str, int]
    charsmap: bytes
    adds_space: bool
    joins_spaces: bool
    ends_words: bool

    def text(self, end: str) -> str | None:
        return self.pieces[self.ends[end]].text if 0 <= self.ends[end] < len(self.pieces) else None


def find_sentencepiece(folder: Path, settings: Mapping[str, Any]) -> SentencePiece | None:
    """Return a folder's SentencePiece model, or None if the file is of another kind or the class adds to it.

    Raises:
        ModelError: If the model cannot be used.
    """
    name = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    path = folder / FILE
    if name not in _CLASSES or "auto_map" in settings or not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return None
    try:
        found = parse(path.read_bytes())
    except (ValueError, LookupError, struct.error):  # tiktoken's files have the same name
        return None
    if found.kind not in (_UNIGRAM, _BPE) or found.ends_words:
        raise ModelError(
            f"{path} is a tokenizer of SentencePiece whose kind is neither unigram nor BPE, or which has spaces at the "
            "end of words: give a tokenizer.json"
        )
    return found


def parse(data: bytes) -> SentencePiece:
    """Read a `ModelProto`; raise ValueError, LookupError or struct.error if it is none."""
    pieces, trainer, normalizer = [], dict[int, Any](), dict[int, Any]()
    for field, value in _fields(data):
        if field == 1:
            of = dict(_fields(_message(value)))
            (score,) = struct.unpack("<f", _message(of.get(2, bytes(4))))
            pieces.append(Piece(_message(of[1]).decode(), score, int(of.get(3, 1))))
        elif field in (2, 3):
            (trainer if field == 2 else normalizer).update(_fields(_message(value)))
    if not pieces:
        raise ValueError("no pieces")
    ends = {name: _signed(int(trainer.get(field, _DEFAULTS[name]))) for name, field in _ENDS.items()}
    return SentencePiece(
        tuple(pieces),
        int(trainer.get(3, _UNIGRAM)),
        bool(trainer.get(35, 0)),
        ends,
        _message(normalizer.get(2, b"")),
        bool(normalizer.get(3, 1)),
        bool(normalizer.get(4, 1)),
        bool(trainer.get(24, 0)),
    )


def _message(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where a message belongs")
    return value


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(kind, -1)
        if kind == _BYTES:
            size, at = _varint(data, at)
        if not 0 <= size <= len(data) - at:
            raise ValueError("a field is longer than its message")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        if (shift := shift + 7) > _LARGEST_SHIFT:
            raise ValueError("a number is too long")


def sentencepiece_backend(
    found: SentencePiece, settings: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    backend = tokenizers.Tokenizer(_unigram(found) if found.kind == _UNIGRAM else _bpe(found))
    backend.normalizer = normalizers.Sequence(list(_steps(found)))
    if found.kind == _BPE and found.adds_space:
        # As transformers, whose scheme adds no space to a text that begins with one.
        scheme = "always" if settings.get("legacy") else "first"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    backend.decoder = decoder(found.adds_space)
    added = [
        AddedToken(piece.text, normalized=False, special=piece.kind == _CONTROL)
        for piece in found.pieces
        if piece.kind in (_CONTROL, _USER_DEFINED) and piece.text
    ]
    add_tokens(backend, added)
    named = {f"{end}_token": text for end in _ENDS if (text := found.text(end)) is not None}
    given = {name: _content(settings.get(f"{name}_token")) or named.get(f"{name}_token") for name in ("bos", "eos")}
    wanted = {"bos": settings.get("add_bos_token", True), "eos": settings.get("add_eos_token", False)}
    ends = {name: (text, backend.token_to_id(text)) for name, text in given.items() if wanted[name] and text}
    surround(backend, {name: (text, index) for name, (text, index) in ends.items() if index is not None})
    return backend, named


def add_tokens(backend: tokenizers.Tokenizer, added: Sequence[AddedToken]) -> None:
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def surround(backend: tokenizers.Tokenizer, ends: Mapping[str, tuple[str, int]]) -> None:
    """Add tokens, by the names "bos" and "eos", to a text that is no conversation."""
    if ends:
        pieces = [name for name in ("bos", "$A", "eos") if name == "$A" or name in ends]
        special = [{"id": name, "ids": [index], "tokens": [text]} for name, (text, index) in ends.items()]
        backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=special)


def _content(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else None


def _unigram(found: SentencePiece) -> models.Unigram:
    lowest = min(piece.score for piece in found.pieces) - _UNLIKELY
    vocabulary = [(piece.text, lowest if piece.kind in _SILENT else piece.score) for piece in found.pieces]
    return models.Unigram(vocabulary, unk_id=found.ends["unk"], byte_fallback=found.has_bytes)


def _bpe(found: SentencePiece) -> models.BPE:
    vocabulary = {piece.text: index for index, piece in enumerate(found.pieces)}
    made = [piece.text for piece in found.pieces if piece.kind not in _SILENT]
    pairs = merges(vocabulary, made, [piece.score for piece in found.pieces])
    return models.BPE(vocabulary, pairs, unk_token=found.text("unk"), fuse_unk=True, byte_fallback=found.has_bytes)


def merges(vocabulary: Mapping[str, int], made: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that SentencePiece merges to one of `made`, the one with the best score first.

    Raises:
        ValueError: If tokens are so long that this takes forever.
    """
    if sum(len(text) ** 2 for text in made) > _MAX_CUTS:
        raise ValueError(f"it has tokens of {max(map(len, made))} characters")
    cuts = ((token[:cut], token[cut:]) for token in made for cut in range(1, len(token)))
    pairs = [pair for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary]
    return sorted(pairs, key=lambda pair: (-scores[vocabulary["".join(pair)]], *map(len, pair)))


def _steps(found: SentencePiece) -> Iterator[normalizers.Normalizer]:
    if found.charsmap:
        yield normalizers.Precompiled(found.charsmap)
    if found.joins_spaces:
        yield normalizers.Replace(Regex("^ +| +$"), "")
        yield normalizers.Replace(Regex(" {2,}"), " ")
    if found.kind == _UNIGRAM and found.adds_space:
        yield normalizers.Prepend(SPACE)
    yield normalizers.Replace(" ", SPACE)


def decoder(adds_space: bool) -> decoders.Decoder:
    stripped = [decoders.Strip(" ", 1, 0)] if adds_space else []
    return decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped])
