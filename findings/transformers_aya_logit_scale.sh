#!/usr/bin/env bash
# Finding: the logits of Aya Vision and Command A Vision in transformers are not those of their language model.
# Version: transformers 5.23.0, torch 2.13.0
# Guess: for a text, a model that sees computes what its language model does, Cohere 2, whose logits are multiplied by
#   logit_scale (0.0625 by default).
# What happens: the class of the whole has the output layer of the language model, but no logit_scale, so that logits
#   are 16 times as large.
# Why it matters: greedy tokens are the same, but sampling at temperature 1 is almost greedy, and log-probabilities
#   differ. Skipjoin runs the language model, with its scale.
source "$(dirname "$0")/support.bash"
packages torch==2.13.0 transformers==5.23.0 numpy==2.4.6
"$PYTHON" - 2>/dev/null <<'PY' | expect "AyaVision 16, Cohere2Vision 16"
import torch
import transformers

text = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
text |= {"num_key_value_heads": 2, "head_dim": 16, "logit_scale": 0.0625, "model_type": "cohere2", "eos_token_id": 2}
vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
vision |= {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}
ids, found = torch.tensor([[5, 9, 33]]), []
for name in ("AyaVision", "Cohere2Vision"):
    config = getattr(transformers, f"{name}Config")(text_config=dict(text), vision_config=dict(vision))
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    alone = transformers.Cohere2ForCausalLM(whole.config.text_config).eval()
    alone.model.load_state_dict(whole.model.language_model.state_dict())
    with torch.no_grad():
        ratio = whole(input_ids=ids).logits[..., 1:] / alone(input_ids=ids).logits[..., 1:]  # not those of padding
    found.append(f"{name} {ratio.median():.0f}")
print(", ".join(found))
PY
