"""Tokenizers. Imports torch only if a folder lacks tokenizer.json, and transformers converts older files."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from skipjoin.model.chat_template import ChatTemplate, Sources, find_template, read_template
from skipjoin.model.errors import ModelError
from skipjoin.model.gguf.file import GgufError, forget_headers, is_gguf
from skipjoin.model.gguf.tokenizer import gguf_tokenizer
from skipjoin.model.sentencepiece import find_sentencepiece, sentencepiece_backend
from skipjoin.model.settings_files import read_json, read_settings
from skipjoin.model.weight_files import check_tokenizer_files

_MAP = "special_tokens_map.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


class SpecialTokens(NamedTuple):
    named: dict[str, str]
    declared: tuple[tokenizers.AddedToken, ...]
    extra: tuple[tokenizers.AddedToken, ...]

    @classmethod
    def read(cls, folder: Path, settings: Mapping[str, Any]) -> SpecialTokens:
        given = dict(settings)
        if "added_tokens_decoder" not in given and (folder / _MAP).is_file():
            given |= read_json(folder / _MAP)
        extra = given.get("extra_special_tokens") or given.get("additional_special_tokens")
        if isinstance(extra, Mapping):
            given |= extra
        named = {name: text for name in given if name.endswith("_token") and (text := _text(given[name]))}
        decoder = given.get("added_tokens_decoder")
        declared = decoder.values() if isinstance(decoder, Mapping) else ()
        return cls(named, _added(declared), _added(extra if isinstance(extra, list) else ()))

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
        named = _added([text for text in dict.fromkeys(self.named.values()) if not added.get(text)])
        extra = [token for token in self.extra if token.content not in added]
        if known := [t for t in (*self.declared, *extra, *named) if backend.token_to_id(t.content) is not None]:
            backend.add_tokens(known)


def _text(token: Any) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _added(tokens: Iterable[Any]) -> tuple[tokenizers.AddedToken, ...]:
    found = []
    for token in tokens:
        flags = token if isinstance(token, Mapping) else {}
        if (text := _text(token)) and flags.get("special", True):
            given = {name: bool(flags[name]) for name in _FLAGS if name in flags}
            found.append(tokenizers.AddedToken(text, special=True, **{"normalized": False, **given}))
    return tuple(found)


_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# NFC shrinks text by at most this factor in bytes.
_NFC_SHRINKS = 3
_OWN_CODE = "it needs code of the model's own (auto_map), which Skipjoin never runs; a tokenizer.json does without"
# The format of questions and their purpose with which Qwen3-Reranker was trained.
_QUESTION = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_PURPOSE = "Given a web search query, retrieve relevant passages that answer the query"
# Tokens kept as context of the next one: enough for any character's bytes and a leading space.
_CONTEXT = 6
# Tokens to wait for a character to complete before its bytes are output as they are.
_PATIENCE = 64


def load_tokenizer(folder: str | Path, *, chat_template: str | Path | None = None) -> Tokenizer:
    folder = Path(folder)
    if not folder.is_dir() and not is_gguf(folder):
        raise ModelError(f"{folder} is not a folder")
    settings = read_settings(folder, "tokenizer_config.json", default={})
    special = SpecialTokens.read(folder, settings)
    backend, defaults = _load_backend(folder, settings)
    special.add_to(backend)
    named = {**defaults, **special.named}
    eos = [backend.token_to_id(named["eos_token"])] if "eos_token" in named else []
    for file in ("generation_config.json", "config.json"):
        value = read_settings(folder, file, default={}).get("eos_token_id")
        eos.extend(value if isinstance(value, list) else [value])
    forget_headers()
    sources = find_template(folder, settings) if chat_template is None else Sources(read_template(Path(chat_template)))
    return Tokenizer(
        backend,
        eos_token_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
        named=named,
        chat_template=None if sources is None else ChatTemplate(sources.default, named, sources.tool_use),
        response_template=settings.get("response_template"),
        prompt=_default_prompt(folder),
    )


def _default_prompt(folder: Path) -> str:
    settings = {} if is_gguf(folder) else read_settings(folder, "config_sentence_transformers.json", default={})
    prompts, name = settings.get("prompts"), settings.get("default_prompt_name")
    found = prompts.get(name) if isinstance(prompts, Mapping) and isinstance(name, str) else None
    return found if isinstance(found, str) else ""


def _load_backend(folder: Path, settings: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    file = folder / "tokenizer.json"
    try:
        if is_gguf(folder):
            return gguf_tokenizer(folder), {}
        if file.is_file():
            backend = tokenizers.Tokenizer.from_file(str(file))
            adds = settings.get("add_bos_token") or settings.get("add_eos_token")
            if backend.post_processor is not None or not adds:
                backend.no_truncation()
                backend.no_padding()
                return backend, {}
        check_tokenizer_files(folder)
        is_alone = not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))
        if is_alone and (pieces := find_sentencepiece(folder, settings)) is not None:
            return sentencepiece_backend(pieces, settings)
        from transformers import AutoTokenizer  # noqa: PLC0415 - imports torch

        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return found.backend_tokenizer, found.special_tokens_map
    except ModelError:
        raise
    except GgufError as error:
        raise ModelError(str(error)) from error
    except Exception as error:  # the libraries raise bare Exception for damaged files
        reason = _OWN_CODE if "trust_remote_code" in str(error) else error
        raise ModelError(f"the tokenizer in {folder} cannot be read: {reason}") from error


class TooManyTokensError(ValueError):
    def __init__(self, found: str) -> None:
        super().__init__(f"the text has {found} tokens")
        self.found = found


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...] = (),
        named: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
        response_template: Any = None,
        prompt: str = "",
    ) -> None:
        self.prompt = prompt
        self.backend = backend
        self.eos_token_ids = eos_token_ids
        self.named = dict(named or {})
        self.chat_template = chat_template
        self.response_template = response_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}
        decoder = "" if backend.decoder is None else backend.decoder.__getstate__().decode()
        self.byte_level = '"ByteLevel"' in decoder
        self._byte_of = _byte_level_alphabet() if self.byte_level else {}
        self._max_bytes = self._bytes_of_longest()

    def _bytes_of_longest(self) -> int:
        shrinks = 1 if self.backend.normalizer is None else _NFC_SHRINKS
        is_known = self.byte_level and isinstance(self.backend.normalizer, tokenizers.normalizers.NFC | None)
        tokens = self.backend.get_vocab(with_added_tokens=False) if is_known else ()
        added = (len(text.encode()) for text in self._added.values())
        return shrinks * max(1, *map(len, tokens), *added) if is_known else 0

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Return the token ids of a text; raise `TooManyTokensError` beyond `most`. Releases the GIL."""
        if most is not None and (least := self.fewest_tokens(text)) > most:
            raise TooManyTokensError(f"at least {least}")
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if most is not None and len(encoding) > most:  # before creating the list, which holds the GIL
            raise TooManyTokensError(str(len(encoding)))
        return encoding.ids

    def encode_many(self, texts: Sequence[str], most: int) -> list[list[int]]:
        """Return the token ids of texts to embed; raise `TooManyTokensError` for one beyond `most`. Uses threads."""
        texts = [self.prompt + text for text in texts]
        self._check_bytes(texts, most)
        encodings = self.backend.encode_batch_fast(texts)
        if (longest := max(map(len, encodings))) > most:
            raise TooManyTokensError(str(longest))
        return [encoding.ids for encoding in encodings]

    def encode_given(self, given: Sequence[str | list[int]]) -> list[list[int]]:
        texts = [item for item in given if isinstance(item, str)]
        found = iter(self.encode_many(texts, sys.maxsize) if texts else [])
        return [next(found) if isinstance(item, str) else item for item in given]

    def encode_pair(self, first: str, second: str, most: int, *, asks: bool = False) -> tuple[list[int], int | None]:
        """Return the token ids of two texts, and where the second begins if the tokenizer marks its tokens.

        With `asks`, the texts form a conversation that asks whether the second fits the first.
        """
        if asks:
            fields = f"<Instruct>: {_PURPOSE}\n\n<Query>: {first}\n\n<Document>: {second}"
            messages = [{"role": "system", "content": _QUESTION}, {"role": "user", "content": fields}]
            return self.chat(messages, most=most, enable_thinking=False), None
        self._check_bytes((first, second), most)
        (encoding,) = self.backend.encode_batch_fast([(first, second)])
        if len(encoding) > most:
            raise TooManyTokensError(str(len(encoding)))
        types = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else None

    def _check_bytes(self, texts: Sequence[str], most: int) -> None:
        if (least := max(map(self.fewest_tokens, texts))) > most:
            raise TooManyTokensError(f"at least {least}")

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the text's tokens; 0 for tokens that are not runs of bytes."""
        return len(text.encode()) // self._max_bytes if self._max_bytes else 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def decode_long(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode while releasing the GIL, at a higher cost for few ids."""
        (text,) = self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        most: int | None = None,
        **variables: Any,
    ) -> list[int]:
        text = self.chat_text(messages, add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False, most=most)

    def ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        return frozenset(i for i in map(self.backend.token_to_id, texts) if i in self.special_ids)

    def has_special(self, text: str) -> bool:
        return any(self._added[i] in text for i in self.special_ids)

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        if self.chat_template is None:
            raise ModelError("this model has no chat template: use completions, or a model tuned for chat")
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def close(self) -> None:
        if self.chat_template is not None:
            self.chat_template.close()

    def is_byte(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self.backend.id_to_token(token_id) or "") is not None

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            return bytes(self._byte_of[char] for char in token if char in self._byte_of)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Detokenizer:
    """Converter of one output to text, in constant time and memory per token. It holds back incomplete characters."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - kept if skip_special_tokens else frozenset()
        # Only the last ids matter; skipped ones give no context.
        tail = [i for i in prompt_ids[-_PATIENCE:] if i not in self._skipped]
        start = max(len(tail) - _CONTEXT, 0)
        while start > 0 and tokenizer.is_byte(tail[start]):
            start -= 1
        self._rebase(tail[start:])

    def _rebase(self, ids: list[int]) -> None:
        self._ids = ids
        # The window is whole characters up to here, so the next window can start here.
        self._boundary = len(ids)
        self._given = len(self._complete(self._decode()))

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False) if self._ids else ""

    def _complete(self, text: str) -> str:
        if self._tokenizer.byte_level:
            return text.removesuffix(_REPLACEMENT)
        return text.rstrip(_REPLACEMENT)

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._decode()
        complete = self._complete(text)
        waited = len(self._ids) > _PATIENCE
        if waited and not self._tokenizer.byte_level:
            complete = text
        new = complete[self._given :]
        self._given = max(self._given, len(complete))
        if waited:
            # Byte-level text changes only at its end, wherever the window starts. Bytes that have not become a
            # character by now would corrupt later ones.
            self._rebase(self._ids[-_CONTEXT:] if self._tokenizer.byte_level else [])
        elif len(complete) == len(text):
            self._rebase(self._ids[self._boundary :])
        return new

    def hidden(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id) if token_id in self._skipped else ""

    def finish(self) -> str:
        rest = self._decode()[self._given :]
        self._given += len(rest)
        return rest
