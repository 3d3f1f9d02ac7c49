from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from skipjoin.model.config import read_json

_MAP = "special_tokens_map.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


class SpecialTokens(NamedTuple):
    """Special tokens of a folder: `named` by the names of chat templates; `declared` replace tokenizer.json's."""

    named: dict[str, str]
    declared: tuple[tokenizers.AddedToken, ...]
    extra: tuple[tokenizers.AddedToken, ...]

    @classmethod
    def read(cls, folder: Path, settings: Mapping[str, Any]) -> SpecialTokens:
        """Return the tokens of a folder. transformers' older file counts only without `added_tokens_decoder`."""
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
        """Make the tokens special that are in the vocabulary, so that texts have them whole and outputs without."""
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
