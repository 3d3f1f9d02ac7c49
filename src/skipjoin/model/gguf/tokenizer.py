"""Tokenizers of GGUF files, made of their vocabulary and merges.

transformers' converter silently splits text as GPT-2 does for schemes that it does not know, such as SmolLM2's. Here,
an unknown scheme is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from skipjoin.model.gguf.file import Gguf, GgufError, read_gguf
from skipjoin.model.gguf.settings import CONTROL, tokens_of
from skipjoin.model.sentencepiece import SPACE, add_tokens, decoder, merges, surround

_UNKNOWN, _USER_DEFINED = 2, 4
# Special tokens of Phi-3 that leave the spaces after them.
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
_GPT4O = _WORDS_BY_CASE + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_regex(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _as_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _by_digit() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _as_gpt2()])


def _as_deepseek_coder() -> pre_tokenizers.PreTokenizer:
    patterns = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.Digits(individual_digits=True), plain])


class _Scheme(NamedTuple):
    """How a byte-level tokenizer (`tokenizer.ggml.pre`) splits text before it merges bytes.

    Attributes:
        keeps_words: A word that is a token is that token, whatever the merges.
        composes: Text is first normalized to NFC.
    """

    split: Callable[[], pre_tokenizers.PreTokenizer]
    keeps_words: bool = False
    composes: bool = False
    adds_bos: bool = False


_GPT2, _DIGITS = _Scheme(_as_gpt2), _Scheme(_by_digit)
_QWEN = _Scheme(lambda: _by_regex(_QWEN2), composes=True)
_LLAMA = _Scheme(lambda: _by_regex(_LLAMA3), keeps_words=True, adds_bos=True)
SCHEMES = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _Scheme(lambda: _by_regex(_LLAMA3))),
    "gpt-4o": _Scheme(lambda: _by_regex(_GPT4O)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN),
    "qwen35": _Scheme(lambda: _by_regex(_QWEN35), composes=True),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone", "codeshell"), _DIGITS),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "mellum", "a.x-4.0"), _GPT2),
    "deepseek-coder": _Scheme(_as_deepseek_coder),
    "tekken": _Scheme(lambda: _by_regex(_TEKKEN), keeps_words=True, adds_bos=True),
}


def gguf_tokenizer(path: Path) -> tokenizers.Tokenizer:
    file = read_gguf(path)
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise GgufError(
            f"{path} has a tokenizer of kind {kind!r:.80} (tokenizer.ggml.model), which cannot be built; those that "
            f"can are {', '.join(_KINDS)}: give the folder or hub id of the model that it was made from"
        )
    try:
        backend, adds_bos = _KINDS[kind](file, tokens_of(file))
        _add_special(backend, file)
        if adds_bos is not None:
            _surround(backend, file, adds_bos)
    except GgufError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise GgufError(f"{path} has a tokenizer that cannot be built: {error}: download it again") from error
    return backend


def _byte_level(file: Gguf, tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    name = file.metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or (scheme := SCHEMES.get(name)) is None:
        raise GgufError(
            f"{file.path} has a tokenizer that splits text by the scheme {name!r:.80} (tokenizer.ggml.pre), which is "
            f"unknown; known are {', '.join(SCHEMES)}: give the folder or hub id of the model that it was made from"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _list(file, "merges", str, None)]
    backend = tokenizers.Tokenizer(models.BPE(_vocabulary(tokens), merges, ignore_merges=scheme.keeps_words))
    if scheme.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = scheme.split()
    backend.decoder = decoders.ByteLevel()
    return backend, scheme.adds_bos


def _sentencepiece(file: Gguf, tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if file.metadata.get(f"tokenizer.ggml.{key}"):
            raise GgufError(
                f"{file.path} has a tokenizer that changes texts first (tokenizer.ggml.{key}), which is not supported: "
                "give the folder or hub id of the model that it was made from"
            )
    vocabulary = _vocabulary(tokens)
    scores = _list(file, "scores", float, len(tokens))
    ordered = merges(vocabulary, tokens, scores)
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    text = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, ordered, unk_token=text, fuse_unk=True, byte_fallback="<0x00>" in vocabulary)
    )
    spaces, adds_space = (
        normalizers.Replace(" ", SPACE),
        bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True)),
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if adds_space else spaces
    backend.decoder = decoder(adds_space)
    return backend, True


def _spaced(file: Gguf, tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """Return a tokenizer of Gemma 4, which merges characters, with a mark in place of spaces."""
    vocabulary = _vocabulary(tokens)
    # A merge may be of spaces' marks, and begin with a space itself.
    pairs = [
        (merge[: merge.index(" ", 1)], merge[merge.index(" ", 1) + 1 :]) for merge in _list(file, "merges", str, None)
    ]
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    text = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, pairs, unk_token=text, fuse_unk=True, byte_fallback="<0x00>" in vocabulary)
    )
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoder(False)
    return backend, True


def _wordpiece(file: Gguf, tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, None]:
    """Return a tokenizer of BERT, and None, as it surrounds texts itself."""
    cls, sep, unknown = (_index(file, tokens, names) for names in (("cls", "bos"), ("seperator", "eos"), ("unknown",)))
    # Words begin with a mark in files, and in vocabularies the parts that follow in a word do.
    vocabulary = _vocabulary([_original(text) for text in tokens])
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=tokens[unknown]))
    # Files do not say whether the model has capital letters.
    is_cased = any(
        text.removeprefix(SPACE) != text.removeprefix(SPACE).lower() and not text.startswith("[") for text in tokens
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=not is_cased)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{tokens[cls]} $A {tokens[sep]}",
        pair=f"{tokens[cls]} $A {tokens[sep]} $B:1 {tokens[sep]}:1",
        special_tokens=[(tokens[cls], cls), (tokens[sep], sep)],
    )
    return backend, None


def _index(file: Gguf, tokens: Sequence[str], names: Sequence[str]) -> int:
    found = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    index = next((number for number in found if number is not None), None)
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise GgufError(f"{file.path} has no token for tokenizer.ggml.{names[0]}_token_id: convert the model again")
    return index


def _original(text: str) -> str:
    if text.startswith(SPACE):
        return text[1:]
    return text if text.startswith("[") and text.endswith("]") else f"##{text}"


_KINDS: dict[str, Callable[[Gguf, Sequence[str]], tuple[tokenizers.Tokenizer, bool | None]]] = {
    "bert": _wordpiece,
    "gemma4": _spaced,
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    return {text: index for index, text in enumerate(tokens)}


def _add_special(backend: tokenizers.Tokenizer, file: Gguf) -> None:
    tokens = tokens_of(file)
    kinds = _list(file, "token_type", int, len(tokens))
    found = [(text, kind) for text, kind in zip(tokens, kinds, strict=True) if text and kind]
    # Files do not say which tokens take the spaces after them. Those of Phi-3 do, and of its successors not.
    strips = file.architecture == "phi3" and file.metadata.get("tokenizer.ggml.model") == "llama"
    added = [
        AddedToken(text, normalized=False, special=kind != _USER_DEFINED, rstrip=strips and text not in _NOT_STRIPPING)
        for text, kind in found
        if kind in (CONTROL, _UNKNOWN, _USER_DEFINED)
    ]
    add_tokens(backend, added)


def _surround(backend: tokenizers.Tokenizer, file: Gguf, adds_bos: bool) -> None:
    wanted = {"bos": file.metadata.get("tokenizer.ggml.add_bos_token", adds_bos)}
    wanted["eos"] = file.metadata.get("tokenizer.ggml.add_eos_token", False)
    ids = {end: file.metadata.get(f"tokenizer.ggml.{end}_token_id") for end, is_added in wanted.items() if is_added}
    tokens = tokens_of(file)
    surround(backend, {end: (tokens[index], index) for end, index in ids.items() if isinstance(index, int)})


def _list(file: Gguf, key: str, kind: type, count: int | None) -> list[Any]:
    found = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or len(found) != (len(found) if count is None else count):
        found = None
    if found is None or not all(isinstance(value, kind) for value in found):
        of = "" if count is None else f" for each of its {count} tokens"
        raise GgufError(f"{file.path} has no tokenizer.ggml.{key}{of}: give a file that has its tokenizer")
    return found
