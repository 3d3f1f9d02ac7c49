"""Formats of strings, of which `make reference` writes a table."""

# Formats that the compiler has, with an example of a text.
COMPILED_FORMATS = {
    "date-time": "2024-02-29T12:00:00Z",
    "date": "2024-02-29",
    "time": "12:00:00Z",
    "duration": "P1D",
    "email": "a@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uuid": "6f2c0b9e-8d0c-4a54-9f0a-2b1f6f9f3a11",
    "uri": "https://example.com/",
}

_HEX = "[0-9a-fA-F]"
_BASE64 = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"
_BASE64URL = "[A-Za-z0-9_-]+"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_ESCAPED = f"%{_HEX}{{2}}"
# Characters beyond ASCII of an IRI (RFC 3987), without private ones.
_BEYOND = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U0001fffd\U00020000-\U0002fffd"
_PLAIN = r"A-Za-z0-9._~!$&'()*+,;=\-"


def _reference(beyond: str, *, is_absolute: bool) -> str:
    plain = _PLAIN + beyond
    part, first, name = (f"(?:[{plain}{more}]|{_ESCAPED})" for more in (":@", "@", ""))
    user, host = f"(?:[{plain}:]|{_ESCAPED})*@", rf"(?:\[[0-9A-Fa-fv:.]+\]|{name}*)"
    rooted = f"//(?:{user})?{host}(?::[0-9]*)?(?:/{part}*)*|/(?:{part}+(?:/{part}*)*)?"
    rest = rf"(?:\?(?:{part}|[/?])*)?(?:#(?:{part}|[/?])*)?"
    absolute = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{rooted}|{part}+(?:/{part}*)*)?"
    relative = f"(?:{rooted}|{first}+(?:/{part}*)*)?"
    return f"^(?:{absolute}{'' if is_absolute else f'|{relative}'}){rest}$"


def _dotted(part: str) -> str:
    return rf"{part}(?:\.{part})*"


_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP = f"{_HEX}{{1,4}}"
_IPV6 = "|".join(
    (
        f"(?:{_GROUP}:){{7}}{_GROUP}",
        f"(?:{_GROUP}:){{1,7}}:",
        f":(?::{_GROUP}){{1,7}}",
        *(f"(?:{_GROUP}:){{1,{7 - after}}}(?::{_GROUP}){{1,{after}}}" for after in range(1, 7)),
        ":{2}",
    )
)
_BITS4, _BITS6 = "(?:3[0-2]|[12]?[0-9])", "(?:12[0-8]|1[01][0-9]|[1-9]?[0-9])"
_NET4, _NET6 = f"{_IPV4}/{_BITS4}", f"(?:{_IPV6})/{_BITS6}"
_SIGNS = r"!#$%&'*+/=?^_`{|}~\-"
_ADDRESS = f"{_dotted(f'[A-Za-z0-9{_SIGNS}]+')}@{_dotted('[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?')}"
_LETTERS = "A-Za-z0-9\u0080-\U0010ffff"
_LABEL = f"[{_LETTERS}](?:[{_LETTERS}-]*[{_LETTERS}])?"
_VARIABLE = rf"{_dotted(f'(?:[A-Za-z0-9_]|{_ESCAPED})+')}(?:\*|:[1-9][0-9]{{0,3}})?"

# Formats that are enforced as patterns: of JSON Schema, OpenAPI, zod and pydantic.
PATTERN_FORMATS = {
    **{
        f"uuid{version}": f"^{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}$"
        for version in range(1, 9)
    },
    "base64": f"^{_BASE64}$",
    "byte": f"^{_BASE64}$",
    "base64url": f"^{_BASE64}$".replace("+/", "_-"),
    "jwt": rf"^{_BASE64URL}\.{_BASE64URL}\.{_BASE64URL}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:[+-][1-9][0-9]*)?(?:#|{_POINTER})$",
    "uri-reference": _reference("", is_absolute=False),
    "iri": _reference(_BEYOND, is_absolute=True),
    "iri-reference": _reference(_BEYOND, is_absolute=False),
    "uri-template": rf"^(?:[{_PLAIN}:/?#\[\]@{_BEYOND}]|{_ESCAPED}|"
    rf"\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$",
    "idn-email": f"^{_dotted(f'[{_LETTERS}{_SIGNS}]+')}@{_dotted(_LABEL)}$",
    "idn-hostname": f"^{_dotted(_LABEL)}$",
    "name-email": rf"^[A-Za-z0-9][A-Za-z0-9 ._'-]* <{_ADDRESS}>$",
    "multi-host-uri": r"^[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#]+[^\s]*$",
    "ipvanyaddress": f"^(?:{_IPV4}|{_IPV6})$",
    **dict.fromkeys(("ipv4network", "ipv4interface"), f"^{_NET4}$"),
    **dict.fromkeys(("ipv6network", "ipv6interface"), f"^{_NET6}$"),
    **dict.fromkeys(("ipvanynetwork", "ipvanyinterface"), f"^(?:{_NET4}|{_NET6})$"),
}
# Formats that say nothing about the text, or that no grammar expresses: pydantic's `Pattern` and `Json`.
IGNORED_FORMATS = (
    "path", "file-path", "directory-path", "binary", "password", "int32", "int64", "float", "double", "decimal",
    "multi-line", "textarea", "markdown", "html", "regex", "json-string",
)  # fmt: skip
