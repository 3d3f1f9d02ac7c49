from __future__ import annotations

from collections.abc import Sequence

from skipjoin.model.tokenizer import Detokenizer, Tokenizer


def prompt_offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str, *, skip_special: bool) -> list[int]:
    """Return for each token of a prompt the index in `text` at which it begins.

    A token that the text does not show begins where the next one does, and bytes of a character where it does.
    """
    is_hidden = [skip_special and token in tokenizer.special_ids for token in ids]
    offsets, found = _decoded_offsets(tokenizer, ids, is_hidden)
    if found == text:
        return offsets
    # The client's text shows its own special tokens, but not those that the tokenizer added.
    encoding = tokenizer.backend.encode(text)
    if encoding.ids != list(ids):
        return offsets
    offsets, found = _decoded_offsets(tokenizer, ids, [bool(is_added) for is_added in encoding.special_tokens_mask])
    if found == text:
        return offsets
    # The tokenizer has changed the text, such as to lower case, but knows the origin of each token.
    last = 0
    for index, (begin, end) in enumerate(encoding.offsets):
        last = offsets[index] = last if encoding.special_tokens_mask[index] else max(last, begin) if end else last
    return offsets


def _decoded_offsets(tokenizer: Tokenizer, ids: Sequence[int], is_hidden: Sequence[bool]) -> tuple[list[int], str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    offsets, parts, length = [], [], 0
    for token, hidden in zip(ids, is_hidden, strict=True):
        offsets.append(length)
        if not hidden:
            parts.append(detokenizer.add(token))
            length += len(parts[-1])
    return offsets, "".join(parts) + detokenizer.finish()
