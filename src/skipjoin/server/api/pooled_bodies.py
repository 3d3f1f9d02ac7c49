from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag, ValidationInfo, field_validator

from skipjoin.sampling import INT32
from skipjoin.server.api.fields import Body, Integer, Label, Null, Only, Text, one_of, text_or_list, text_or_object
from skipjoin.server.api.protocol import RequestBody, TokenIds, prompt_kind

MAX_INPUTS = 2048  # as in OpenAI's API

Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS), Field(fail_fast=True)]
Input = Annotated[
    Annotated[Text, Tag("~text")]
    | Annotated[Texts, Tag("~texts")]
    | Annotated[TokenIds, Tag("~ids")]
    | Annotated[list[TokenIds], Field(max_length=MAX_INPUTS), Field(fail_fast=True), Tag("~id_lists")],
    one_of(prompt_kind, "must be a string, a list of strings, a list of token ids, or a list of such lists"),
]


class PooledBody(RequestBody):
    """Shared fields. Texts are never cut: one that is too long is an error."""

    safety_identifier: Label = None
    add_special_tokens: Annotated[Any, Only(None, True)] = None
    truncate_prompt_tokens: Null = None


class EmbeddedBody(PooledBody):
    dimensions: Annotated[int, Integer(1, INT32)] | None = None

    @property
    @abstractmethod
    def inputs(self) -> list[str | list[int]]:
        pass


class EmbeddingRequest(EmbeddedBody):
    """Body of POST /v1/embeddings."""

    large_fields: ClassVar[Mapping[str, str]] = {"input": "inputs"}
    input: Input
    encoding_format: Literal["float", "base64"] | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        given = self.input
        return list(given) if isinstance(given, list) and not isinstance(given[0], int) else [given]


class Document(Body):
    """Document as an object, as in Cohere's first version."""

    text: Text


class PairsBody(PooledBody):
    dimensions: Null = None

    @property
    @abstractmethod
    def firsts(self) -> list[str]:
        """The first text of all pairs, or of each."""

    @property
    @abstractmethod
    def seconds(self) -> list[str]: ...

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Indexes of both texts of each pair."""
        is_shared = len(self.firsts) == 1
        return [(0 if is_shared else index, index) for index in range(len(self.seconds))]


class RerankRequest(PairsBody):
    """Body of POST /v1/rerank."""

    large_fields: ClassVar[Mapping[str, str]] = {"documents": "documents", "query": "prompt"}
    query: Text
    documents: Annotated[
        list[
            Annotated[
                Annotated[Text, Tag("~text")] | Annotated[Document, Tag("~object")],
                one_of(text_or_object, "must be a string, or an object with a text"),
            ]
        ],
        Field(min_length=1, max_length=MAX_INPUTS),
        Field(fail_fast=True),
    ]
    top_n: Annotated[int, Integer(1, INT32)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Null = None
    rank_fields: Null = None

    @property
    def firsts(self) -> list[str]:
        return [self.query]

    @property
    def seconds(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


SomeTexts = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[Texts, Tag("~list")],
    one_of(text_or_list, "must be a string or a list of strings"),
]


class ScoreRequest(PairsBody):
    """Body of POST /score: one text with each of several, or pairs."""

    large_fields: ClassVar[Mapping[str, str]] = {"text_1": "inputs", "text_2": "inputs"}
    text_1: SomeTexts
    text_2: SomeTexts

    @field_validator("text_2")
    @classmethod
    def _has_as_many(cls, value: str | list[str], info: ValidationInfo) -> str | list[str]:
        first = info.data.get("text_1")
        ours, theirs = len(_listed(value)), len(_listed(first)) if first is not None else 1
        if theirs not in (1, ours):
            raise ValueError(f"it must have as many texts as text_1, {theirs}, got {ours}")
        return value

    @property
    def firsts(self) -> list[str]:
        return _listed(self.text_1)

    @property
    def seconds(self) -> list[str]:
        return _listed(self.text_2)


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
