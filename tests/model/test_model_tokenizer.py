from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
import tomllib
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from skipjoin.model.errors import ModelError
from skipjoin.model.tokenizer import Detokenizer, Tokenizer, load_tokenizer

TEMPLATE = """{{ bos_token }}{% for m in messages %}
{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
{% generation %}[{{ m.role }}]{{ m.content }}{% endgeneration %}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
CORPUS = ["the quick brown fox jumps over the lazy dog, hello world", "数字 你好世界", "naïve café — ok 😀👍🏽"] * 5


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_fallback() -> Backend:
    """Return a tokenizer like those of sentencepiece: spaces are U+2581, unknown characters single-byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["\u2581", *"abcdefghijklmnopqrstuvwxyz,.", "\u2581t", "\u2581th", "\u2581the", "he", "lo", "世", "é"]
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e"), ("h", "e"), ("l", "o")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return backend


KINDS = {"byte-level": byte_level, "byte-fallback": byte_fallback}


@pytest.fixture(scope="module", params=sorted(KINDS))
def kind(request) -> Tokenizer:
    return Tokenizer(KINDS[request.param]())


@pytest.fixture
def folder(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    return tmp_path


def random_text(generator: random.Random) -> str:
    parts = ["the ", "hello", " ", "😀", "👍🏽", "你好", "世", "é", "\n", "क्षि", "\U00010348", ".", "a", "\u00a0", "lo"]
    return "".join(generator.choice(parts) for _ in range(generator.randint(0, 25)))


def streamed(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.add(i) for i in ids), detokenizer.finish()]


def test_streamed_text_equals_the_decoded_text(kind):
    generator = random.Random(1)
    for _ in range(200):
        ids = kind.encode(random_text(generator), add_special_tokens=False)
        parts = streamed(kind, [], ids)
        assert "".join(parts) == kind.decode(ids)
        assert not any("\ufffd" in part for part in parts)


def test_streamed_text_continues_the_prompt(kind):
    generator = random.Random(2)
    for _ in range(200):
        ids = kind.encode("the fox" + random_text(generator), add_special_tokens=False)
        cut = generator.randint(1, len(ids))
        whole, prompt = kind.decode(ids), kind.decode(ids[:cut])
        if not prompt.endswith("\ufffd"):
            assert "".join(streamed(kind, ids[:cut], ids[cut:])) == whole[len(prompt) :]


def test_special_tokens_are_streamed_or_skipped(kind):
    ids = []
    for word in ("the", " hello", " 世"):
        ids += [*kind.encode(word, add_special_tokens=False), 1]
    for skip in (True, False):
        expected = kind.decode(ids, skip_special_tokens=skip)
        assert "".join(streamed(kind, [], ids, skip)) == expected


def test_random_byte_tokens_are_streamed():
    tokenizer = Tokenizer(byte_level())
    generator = random.Random(3)
    for _ in range(100):
        ids = [generator.randrange(2, tokenizer.vocab_size) for _ in range(generator.randint(1, 200))]
        assert "".join(streamed(tokenizer, [], ids)) == tokenizer.decode(ids)


def test_incomplete_characters_are_held_until_the_end(kind):
    ids = kind.encode("a👍", add_special_tokens=False)
    parts = streamed(kind, [], ids[:-1])
    assert "".join(parts[:-1]) == "a"
    assert set(parts[-1]) == {"\ufffd"}


def test_invalid_bytes_are_replaced_at_the_end():
    tokenizer = Tokenizer(byte_fallback())
    orphan = tokenizer.backend.token_to_id("<0x80>")
    parts = streamed(tokenizer, [], [orphan] * 300)
    assert "".join(parts[:200]).count("\ufffd") > 100
    assert "".join(parts).count("\ufffd") == 300


def test_token_bytes_concatenate_to_the_text(kind):
    text = "the 😀 你好é"
    ids = kind.encode(text, add_special_tokens=False)
    assert b"".join(kind.token_bytes(i) for i in ids).decode().strip() == text
    assert kind.token_bytes(1) == ("</s>" if kind.byte_level else "<s>").encode()
    assert kind.token_bytes(10**6) == b""
    assert kind.token_text(ids[0]).strip() != ""


def test_tokenizer_is_loaded_from_its_folder(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token_ids == (1, 7)
    assert tokenizer.vocab_size == tokenizer.backend.get_vocab_size()
    assert tokenizer.decode(tokenizer.encode("hello 世界")) == "hello 世界"
    assert tokenizer.decode([1, *tokenizer.encode("hi")], skip_special_tokens=False) == "</s>hi"


def test_bos_token_is_added_on_request(tmp_path):
    byte_fallback().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode("the", add_special_tokens=False) == tokenizer.encode("the")[1:]


def test_chat_template_is_rendered(folder):
    tokenizer = load_tokenizer(folder)
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.decode(tokenizer.chat(messages), skip_special_tokens=False) == "<s>[user]hello[assistant]"
    ids = tokenizer.chat(messages, add_generation_prompt=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>[user]hello"
    with pytest.raises(ModelError, match="no tools here"):
        tokenizer.chat([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("is_list", [True, False])
def test_models_may_have_a_template_for_tools(folder, is_list):
    named = {"default": "plain", "tool_use": "with {{ tools | length }} {# <tool_call> #}", "rag": "no"}
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    listed = [{"name": name, "template": text} for name, text in named.items()]
    file.write_text(json.dumps(settings | {"chat_template": listed if is_list else named}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_text([]) == tokenizer.chat_text([], tools=[]) == "plain"
    assert tokenizer.chat_text([], tools=[{}]) == "with 1 "
    assert "tools" in tokenizer.chat_template.variables
    assert "<tool_call>" in tokenizer.chat_template.source
    tokenizer.close()


def test_unusable_chat_templates_are_rejected(folder):
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"chat_template": "{% if %}"}))
    with pytest.raises(ModelError, match="does not compile"):
        load_tokenizer(folder).chat_template.check()
    file.write_text(json.dumps(settings | {"chat_template": "{{ messages[0].content.__class__.__mro__ }}"}))
    with pytest.raises(ModelError, match="rejects"):
        load_tokenizer(folder).chat([{"role": "user", "content": "x"}])
    file.write_text(json.dumps(settings | {"chat_template": None}))
    with pytest.raises(ModelError, match="no chat template"):
        load_tokenizer(folder).chat([])


ENDLESS = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ 'é'.encode('ascii') }}", ENDLESS])
def test_template_exceptions_are_logged_only(folder, caplog, source):
    """Clients do not get the text of an exception, which may contain anything."""
    (folder / "chat_template.jinja").write_text(source)
    tokenizer = load_tokenizer(folder)
    for _ in range(3):
        with pytest.raises(ModelError) as refused:
            tokenizer.chat([{"role": "user", "content": "x"}])
        assert str(refused.value) == "the model's chat template fails on this conversation"
    assert len(caplog.records) == 1


def test_jinja_has_the_fixed_sandbox():
    """Before 3.1.6 a template could escape the sandbox by calling str.format through a filter (CVE-2025-27516)."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (needed,) = (line for line in project["optional-dependencies"]["serve"] if line.startswith("jinja2"))
    assert Requirement(needed).specifier.contains("3.1.6")
    assert not Requirement(needed).specifier.contains("3.1.5")


def test_template_file_takes_precedence(folder):
    (folder / "chat_template.jinja").write_text("{{ messages | tojson }}", encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.chat([{"a": "<é>"}])) == '[{"a": "<é>"}]'


def test_a_processor_may_have_the_template(folder):
    parts = "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    text = f"{{% for m in messages %}}{{{{ m['role'] }}}}: {parts}{{% endfor %}}"
    file = folder / "tokenizer_config.json"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    chat = [{"role": "user", "content": "hello"}]
    assert load_tokenizer(folder).chat_text(chat) == "<s>[user]hello[assistant]"  # that of the tokenizer
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({name: settings[name] for name in settings if name != "chat_template"}))
    assert load_tokenizer(folder).chat_text(chat) == "user: hello"


def test_unusable_folders_are_rejected(tmp_path):
    with pytest.raises(ModelError, match="is not a folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="has no tokenizer files"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_legacy_tokenizer_files_are_loaded_by_transformers(tmp_path):
    byte_level().model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello 世界")) == "hello 世界"


SENTENCEPIECE = json.loads(Path(__file__).with_name("sentencepiece_models.json").read_text(encoding="utf-8"))


def write_sentencepiece(folder: Path, name: str, **settings: object) -> None:
    (folder / "tokenizer.model").write_bytes(zlib.decompress(base64.b64decode(SENTENCEPIECE["models"][name]["model"])))
    kind = {"tokenizer_class": name} if name.endswith("Tokenizer") else {}
    (folder / "tokenizer_config.json").write_text(json.dumps({**kind, **settings}))


@pytest.mark.parametrize("name", SENTENCEPIECE["models"])
def test_models_of_sentencepiece_need_no_other_file(tmp_path: Path, name: str) -> None:
    """`sentencepiece_models.py` has the command that writes the ids."""
    write_sentencepiece(tmp_path, name)
    tokenizer, expected = load_tokenizer(tmp_path), SENTENCEPIECE["models"][name]
    texts = SENTENCEPIECE["texts"] + (SENTENCEPIECE["special"] if name.endswith("Tokenizer") else [])
    assert [tokenizer.encode(text) for text in texts] == expected["ids"]
    found = [tokenizer.decode(ids).replace(" <unk>", "<unk>") for ids in expected["ids"]]
    assert found == [text.replace(" <unk>", "<unk>") for text in expected["decoded"]]
    bos, eos = (tokenizer.backend.token_to_id(tokenizer.named[end]) for end in ("bos_token", "eos_token"))
    assert (bos, (eos,)) == (expected["ids"][0][0], tokenizer.eos_token_ids)
    assert tokenizer.special_ids >= {bos, eos}


def test_files_of_sentencepiece_are_checked(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path, "LlamaTokenizer", add_bos_token=False, add_eos_token=True)
    file = tmp_path / "tokenizer.model"
    whole = file.read_bytes()
    assert load_tokenizer(tmp_path).encode("a")[-1] == 2
    # A scheme of other kinds, or words that end with spaces.
    for changed in (whole + b"\x12\x02\x18\x03", whole + b"\x12\x03\xc0\x01\x01"):
        file.write_bytes(changed)
        with pytest.raises(ModelError, match="whose kind is neither unigram nor BPE"):
            load_tokenizer(tmp_path)
    for cut in (1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with suppress(ModelError):  # it may be whole pieces
            load_tokenizer(tmp_path)


def test_tokenizers_do_not_import_torch(folder):
    code = (
        "import sys; from skipjoin.model.tokenizer import load_tokenizer;"
        f"load_tokenizer({str(folder)!r}).encode('x'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tokenizers_with_custom_code_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto_map` names a class in a file of the folder, which transformers would import after consent."""
    prompts: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": prompts.append(text) or "y")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    auto_map = {"AutoTokenizer": ["own.Tokens", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Tokens", "auto_map": auto_map}))
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Tokens: pass\n")
    with pytest.raises(ModelError, match=r"needs code of the model's own \(auto_map\), which Skipjoin never runs"):
        load_tokenizer(tmp_path)
    assert not prompts
    assert not (tmp_path / "ran").exists()


def flags(text: str, *, special: bool = True) -> dict[str, object]:
    return {
        "content": text,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
        "special": special,
    }


SPECIAL = {
    "texts": ({}, {"eos_token": "<end>", "bos_token": "<s>"}),
    "tokens": ({}, {"eos_token": flags("<end>"), "unk_token": flags("<s>")}),
    "both files": (
        {"eos_token": "<s>", "pad_token": "<s>"},
        {"eos_token": "<end>", "additional_special_tokens": ["o"]},
    ),
    "null in the map": ({"eos_token": "<s>"}, {"eos_token": None}),
    "current file": ({"eos_token": "<s>", "added_tokens_decoder": {"3": flags("<end>")}}, {"eos_token": "<end>"}),
    "no map": ({"eos_token": "<end>", "extra_special_tokens": {"image_token": "<s>"}}, None),
    "list": ({"extra_special_tokens": ["<end>", "e"]}, None),
    "plain token": ({"eos_token": "</s>", "added_tokens_decoder": {"3": flags("<end>", special=False)}}, None),
    "word": ({"pad_token": "o"}, None),
    "none": ({}, None),
}


@pytest.mark.parametrize("case", SPECIAL)
def test_special_tokens_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415 - imports torch

    backend = byte_level()
    backend.add_tokens(["<end>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "image_token")
    template = "".join(f"{{{{ {name} }}}}|" for name in names)
    settings, tokens = SPECIAL[case]
    given = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **settings}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    if tokens is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert ours.chat_text([{"role": "user", "content": "x"}]) == theirs.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False
    )
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    ids = ours.encode("hello<end>o<s>e</s>", add_special_tokens=False)
    assert ids == theirs.encode("hello<end>o<s>e</s>", add_special_tokens=False)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert "".join(streamed(ours, [], ids)) == ours.decode(ids)
    ours.close()
