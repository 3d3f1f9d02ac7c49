"""Measure embeddings of texts of 50 to 500 tokens, in turn with sentence-transformers on the same model.

    python benchmarks/performance/embeddings/run.py --out FILE [--texts 1000] [--turns 3] [--dtype bfloat16]

The model has the shape of all-MiniLM-L6 (22.7M parameters, mean of the tokens, normalized) and random weights. Both
engines tokenize. CPU seconds matter where other programs run on the machine.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import harness
from peer_venvs import python_of

CHILD = Path(__file__).with_name("child.py")
PEER = "sentence-transformers"
VOCAB, SPECIAL = 30_522, ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
SHORTEST, LONGEST = 50, 500


def make_model(folder: Path, dtype: torch.dtype) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: PLC0415
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast  # noqa: PLC0415 - takes two seconds

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    BertModel(config, add_pooling_layer=False).to(dtype).save_pretrained(folder)
    words = {name: at for at, name in enumerate((*SPECIAL, *(f"w{at}" for at in range(len(SPECIAL), VOCAB))))}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = [(name, words[name]) for name in SPECIAL[2:]]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=512, **names).save_pretrained(folder)
    kinds = ("Transformer", "Pooling", "Normalize")
    parts = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(parts))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 384, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def make_texts(count: int) -> list[str]:
    draw = random.Random(1)
    # With the two special tokens.
    lengths = [draw.randint(SHORTEST, LONGEST) - 2 for _ in range(count)]
    return [" ".join(f"w{draw.randrange(len(SPECIAL), VOCAB)}" for _ in range(length)) for length in lengths]


class Child:
    def __init__(self, engine: str, *arguments: object) -> None:
        python = sys.executable if engine == "skipjoin" else str(python_of("sentence"))
        command = [python, CHILD, engine, *arguments]
        self._process = subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def run(self) -> tuple[float, float]:
        """Return the wall and CPU seconds of all texts."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        wall, cpu = json.loads(self._read())
        return wall, cpu

    def _read(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"the child exited with code {self._process.wait()}")
        return line

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    parser = harness.parser(__doc__, texts=1000, turns=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    given = parser.parse_args()
    record = harness.new_record(texts=given.texts, dtype=given.dtype)
    times: dict[str, list[tuple[float, float]]] = {"skipjoin": [], PEER: []}
    with harness.scratch() as folder, ExitStack() as stack:
        make_model(folder / "model", getattr(torch, given.dtype))
        texts, model = folder / "texts.json", folder / "model"
        texts.write_text(json.dumps(make_texts(given.texts)))
        children = {}
        for engine in times:
            children[engine] = Child(engine, model, given.dtype, texts, folder / f"{engine}.npy")
            stack.callback(children[engine].stop)
        for _, engine in harness.turns(times, range(given.turns)):
            times[engine].append(children[engine].run())
            harness.show(engine, *(round(one, 2) for one in times[engine][-1]))
        ours, theirs = (np.load(folder / f"{engine}.npy") for engine in times)
        record["smallest_cosine"] = round(float((ours * theirs).sum(-1).min()), 6)
    for at, name in enumerate(("wall_s", "cpu_s")):
        record[name] = {engine: harness.spread([one[at] for one in runs]) for engine, runs in times.items()}
        of = [[one[at] for one in times[engine]] for engine in (PEER, "skipjoin")]
        record[f"times_as_fast_{name}"] = harness.median_ratio(*of)
    harness.report(record, given.out)


if __name__ == "__main__":
    main()
