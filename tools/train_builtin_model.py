"""Train the built-in model `tally`, a small Llama, and write its folder.

    python tools/train_builtin_model.py [--steps 6500] [--tool-steps 6000] [--seed 0] [--threads 2] [--out FOLDER]
    python tools/train_builtin_model.py --evaluate-only FOLDER

The model first learns the tasks of builtin_tasks.py, and then also the calls of builtin_calls.py. The folder has
Hugging Face format: weights, tokenizer, chat template, a model card, and accuracy.json with the exact-match accuracy of
greedy generation on held-out prompts. The same seed, threads and machine give the same model.
Training takes about three quarters of an hour on one core. `--start FOLDER` begins with the weights of the first stage.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from builtin_calls import SYSTEM_PROMPTS, TURNS, Function, Turn, draw_turn
from builtin_tasks import FAMILIES, HELD_OUT_PERCENT, Task, draw_task

BOS, USER, ASSISTANT, SYSTEM, END, PAD = "<|bos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>"
# The comment names the format of calls for the server.
CHAT_TEMPLATE = (
    "{#- Calls are written as after <|python_tag|>, one per message. -#}{{- '<|bos|>' -}}"
    "{%- if tools -%}{{- '<|system|>Functions: ' -}}{%- for tool in tools -%}"
    "{%- set parameters = tool['function']['parameters'] or {} -%}"
    "{{- tool['function']['name'] + '(' + (parameters['properties'] or {}) | join(', ') + ')' -}}"
    "{{- '; ' if not loop.last else '<|end|>' -}}{%- endfor -%}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|user|>Result: ' if message['role'] == 'tool' else '<|' + message['role'] + '|>' -}}"
    "{{- message['content'] or '' -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{- '{\"name\": \"' + call['function']['name'] + '\", \"parameters\": ' -}}"
    "{{- call['function']['arguments'] | tojson -}}{{- '}' -}}{%- endfor -%}"
    "{{- '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
CONTEXT = 1024
LAST_NUMBER_TOKEN = 299  # largest number that is one token
STEP_TOKENS = 2048
IGNORED = -100
TOOLS_SHARE = 0.5  # of the second stage's examples
# Learning rate of the second stage, as a share of the first stage's: it should not undo what was learned.
SECOND_RATE = 0.8
DEFAULT_OUT = Path(__file__).resolve().parents[1] / "src" / "skipjoin" / "builtin" / "tally"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer whose only merges are ", " and the numbers 10 to 299.

    Numbers are single tokens, so counting is a table of successors. Letters are single tokens, so spelling is copying.
    Any text can be encoded and decoded without change.
    """
    space = "\u0120"  # a space in the byte-level alphabet
    vocab = {token: index for index, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), f",{space}"])}
    merges = [(",", space)]
    for number in range(10, LAST_NUMBER_TOKEN + 1):
        text = str(number)
        cut = len(text) - 1
        # In "212" the smaller number, 12, is merged first, which leaves 2 and 12 to merge.
        if len(text) == 3 and text[1] != "0" and int(text[1:]) < int(text[:2]):
            cut = 1
        merges.append((text[:cut], text[cut:]))
        vocab[text] = len(vocab)
    backend = Tokenizer(BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9]+|, |[^0-9,]+|,"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, USER, ASSISTANT, SYSTEM, END, PAD])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build the untrained model."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


class Examples:
    """Endless training examples as token ids from one seeded generator, a share of them with tools."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, tools_share: float = 0.0) -> None:
        self._rng = random.Random(seed)
        self._tokenizer = tokenizer
        self._tools_share = tools_share

    def one(self) -> tuple[list[int], int]:
        """Return the ids of one example and the position of its answer.

        Most examples are a single turn; some have a system prompt or an earlier turn, or are a bare prompt that ends
        with a line break.
        """
        rng = self._rng
        if self._tools_share and rng.random() < self._tools_share:
            turn = draw_turn(rng)
            return self._ids(rendered(self._tokenizer, turn), turn.answer)
        task, draw = draw_task(rng), rng.random()
        if draw < 0.04:
            return self._ids(f"{BOS}{task.prompt}\n", task.answer)
        text = BOS
        if draw < 0.12:
            text += f"{SYSTEM}{rng.choice(SYSTEM_PROMPTS)}{END}"
        elif draw < 0.18:
            earlier = draw_task(rng, rng.choice(["spell", "alphabet", "small talk", "reverse"]))
            text += f"{USER}{earlier.prompt}{END}{ASSISTANT}{earlier.answer}{END}"
        return self._ids(f"{text}{USER}{task.prompt}{END}{ASSISTANT}", task.answer)

    def _ids(self, before: str, answer: str) -> tuple[list[int], int]:
        prompt, end = (self._tokenizer.encode(text, add_special_tokens=False) for text in (before, answer + END))
        return prompt + end, len(prompt)

    def batches(self, pad: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield inputs and targets of shape [examples, tokens] with about STEP_TOKENS tokens.

        Examples of similar length share a batch, which limits padding. Only answers are targets.
        """
        while True:
            pool = sorted((self.one() for _ in range(600)), key=lambda example: len(example[0]))
            groups: list[list[tuple[list[int], int]]] = [[]]
            for example in pool:
                if groups[-1] and len(example[0]) * (len(groups[-1]) + 1) > STEP_TOKENS:
                    groups.append([])
                groups[-1].append(example)
            self._rng.shuffle(groups)
            yield from (_pad(group, pad) for group in groups)


def _pad(group: list[tuple[list[int], int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids, _ in group)
    inputs = torch.full((len(group), width), pad)
    targets = torch.full((len(group), width), IGNORED)
    for row, (ids, answer) in enumerate(group):
        inputs[row, : len(ids)] = torch.tensor(ids)
        targets[row, answer - 1 : len(ids) - 1] = torch.tensor(ids[answer:])
    return inputs, targets


def train(
    model: LlamaForCausalLM, examples: Examples, pad: int, steps: int, folder: Path, *, peak: float = 1.0
) -> None:
    """Train in place, with Muon for the matrices of the layers, AdamW for the rest, and a cosine schedule."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=4e-3, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]

    def rate(step: int) -> float:
        return peak * min(1.0, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * step / steps))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    mean = 0.0
    with Progress(*columns) as bars:
        bar = bars.add_task("training", total=steps)
        for step, (inputs, targets) in zip(range(steps), examples.batches(pad), strict=False):
            hidden = model.model(input_ids=inputs).last_hidden_state
            is_target = targets != IGNORED
            loss = F.cross_entropy(model.lm_head(hidden[is_target]), targets[is_target])
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
            mean = loss.item() if step == 0 else 0.98 * mean + 0.02 * loss.item()
            bars.update(bar, advance=1, description=f"step {step + 1}, loss {mean:.4f}")
            if (step + 1) % 500 == 0:
                bars.print(f"step {step + 1} loss {mean:.4f}")
                model.save_pretrained(folder)


@torch.inference_mode()
def evaluate(folder: Path, prompts: int) -> dict[str, float]:
    """Return the exact-match percentage of greedy generation by family, on `prompts` held-out prompts each.

    The stored model answers through its chat template. The documentation's examples are families of their own.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    result = {}
    for family, turns in _held_out(prompts):
        parts = [turns[first : first + 50] for first in range(0, len(turns), 50)]
        answers = [answer for part in parts for answer in _answers(model, tokenizer, part)]
        right = sum(answer == turn.answer for answer, turn in zip(answers, turns, strict=True))
        result[family] = round(100 * right / len(turns), 1)
        print(f"{family:22} {result[family]:5.1f} % of {len(turns)}", flush=True)
    return result


def _held_out(prompts: int) -> Iterator[tuple[str, list[Turn]]]:
    """Yield families with held-out conversations."""
    rng = random.Random(1234)
    for family in FAMILIES:
        seen: dict[str, Task] = {}
        for _ in range(200 * prompts):  # a family may have fewer held-out prompts
            task = draw_task(rng, family, held_out=True)
            seen[task.prompt] = task
            if len(seen) == prompts:
                break
        yield family, [_turn(prompt, task.answer) for prompt, task in seen.items()]
    for name in TURNS:
        yield name, [draw_turn(rng, name, held_out=True) for _ in range(prompts)]
    yield "Count from 3 to 12", [_turn("Count from 3 to 12", "3, 4, 5, 6, 7, 8, 9, 10, 11, 12")]
    weather = '{"name": "weather", "parameters": {"city": "Oslo"}}'
    yield "Weather in Oslo", [_turn("What is the weather in Oslo?", weather, Function("weather", ("city",)))]
    add = '{"name": "add", "parameters": {"a": 12, "b": 30}}'
    yield "12 plus 30", [_turn("What is 12 plus 30?", add, Function("add", ("a", "b")))]


def _turn(prompt: str, answer: str, *functions: Function) -> Turn:
    return Turn(functions, [{"role": "user", "content": prompt}], answer)


def rendered(tokenizer: PreTrainedTokenizerFast, turn: Turn) -> str:
    """Return the conversation as the server renders it."""
    tools = [function.tool for function in turn.functions]
    return tokenizer.apply_chat_template(turn.messages, tools=tools or None, add_generation_prompt=True, tokenize=False)


def _answers(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, turns: list[Turn]) -> list[str]:
    texts = [rendered(tokenizer, turn) for turn in turns]
    inputs = tokenizer(texts, add_special_tokens=False, return_tensors="pt", padding=True, return_token_type_ids=False)
    longest = max(len(tokenizer.encode(turn.answer)) for turn in turns) + 2
    outputs = model.generate(**inputs, max_new_tokens=longest, do_sample=False)
    answers = []
    for ids in outputs[:, inputs["input_ids"].shape[1] :].tolist():
        # An answer without the end token is an error, whatever its text.
        end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else None
        answers.append(tokenizer.decode(ids[:end]) if end is not None else "")
    return answers


def write_card(folder: Path, accuracy: dict[str, float], parameters: int, how: str, prompts: int) -> None:
    """Write accuracy.json and the model card."""
    (folder / "accuracy.json").write_text(json.dumps(accuracy, indent=1) + "\n")
    rows = "\n".join(f"| {family} | {value} % |" for family, value in accuracy.items())
    (folder / "README.md").write_text(
        f"""---
license: apache-2.0
---
# tally

A toy language model that comes with Skipjoin, for showing and testing the server without a download: its answers are
from one to several hundred tokens long, and how long follows from the prompt. It is good for nothing else.

It counts ("Count from 3 to 12"), counts down, lists even numbers, spells a word, repeats a word n times in numbered
lines, writes multiplication tables up to 12 x 12, reverses a list of numbers below 100, says a stretch of the
alphabet, greets, and says that it does not know anything else. English only; numbers up to 200; words of up to about 8
letters.

- Llama shape: {parameters:,} parameters, 4 layers, 128 wide, float32; context of {CONTEXT} tokens, trained on up to
  about 450.
- Tokenizer: bytes, the numbers 10 to {LAST_NUMBER_TOKEN}, ", " and special tokens.
- Training: {how}, on what
  `tools/builtin_tasks.py` and `tools/builtin_calls.py` generate; nothing else was trained on.
- License: Apache-2.0.

Exact match of greedy answers through the chat template, stored weights, {prompts} prompts (or as many as there are) of
the {HELD_OUT_PERCENT} % that training never saw, per family:

| family | exact match |
|---|---|
{rows}

A bare completion works too if a line break ends the prompt. Long conversations, other wordings and other tasks are
outside of what it learned.

With tools, it calls a function that adds, subtracts, multiplies, or gives the weather or the time of a place, such as
`add(a, b)` or `weather(city)`, and repeats the result. `tools/builtin_calls.py` has the names that it knows. Enforced
calls of other functions match their schema, with senseless values.
"""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6500)
    parser.add_argument("--tool-steps", type=int, default=6000)
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="weights of the first stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=200, help="held-out prompts per family")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--evaluate-only", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if args.evaluate_only:
        print(json.dumps(evaluate(args.evaluate_only, args.prompts), indent=1))
        return
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(args.out)
    pad = tokenizer.pad_token_id
    if args.start is None:
        model = build_model(tokenizer)
        train(model, Examples(tokenizer, args.seed), pad, args.steps, args.out)
    else:
        model = LlamaForCausalLM.from_pretrained(args.start).train()
    train(model, Examples(tokenizer, args.seed, TOOLS_SHARE), pad, args.tool_steps, args.out, peak=SECOND_RATE)
    model.save_pretrained(args.out)
    accuracy = evaluate(args.out, args.prompts)
    how = (
        f"`python tools/train_builtin_model.py --steps {args.steps} --tool-steps {args.tool_steps} "
        f"--seed {args.seed} --threads {args.threads}`"
    )
    write_card(args.out, accuracy, model.num_parameters(), how, args.prompts)


if __name__ == "__main__":
    main()
