#!/bin/sh
# peft 0.21.2: saving an adapter sorts its `alpha_pattern`, and the order decides: what is loaded is another adapter.
#
# Where two keys of `alpha_pattern` or `rank_pattern` fit a module, the first one counts, not the longer one. So a general
# key before a special one hides it. `save_pretrained` writes adapter_config.json with sorted keys, and there `layers.1.q_proj`
# comes before `q_proj`: the layer was trained with one scale and is served with another. Nothing is said. With
# `rank_pattern` the shapes do not fit, and loading raises.
#
# Seen with: peft 0.21.2, torch 2.13.0, transformers 5.23.0, Python 3.11. Prints the scales of both layers, as made and as
# loaded, and fails when they are the same.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check peft==0.21.2 torch==2.13.0 transformers==5.23.0
"$folder/env/bin/python" - "$folder/adapter" <<'PYTHON'
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn


def base():
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"q_proj": nn.Linear(4, 4)}) for _ in range(2))
    return model


def layers(model):
    return [layer["q_proj"] for layer in model.base_model.model.layers]


def made(**patterns):
    config = LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False, **patterns)
    model = get_peft_model(base(), config).eval()
    model.save_pretrained(sys.argv[1])
    return model


def same(first, second):
    """Whether both orders of the keys lead to the model that was saved."""
    model = made(alpha_pattern={first: KEYS[first], second: KEYS[second]})
    loaded = PeftModel.from_pretrained(base(), sys.argv[1]).eval()
    scales = [[layer.scaling["default"] for layer in layers(one)] for one in (model, loaded)]
    print(f"{first}, {second}: made with {scales[0]}, loaded with {scales[1]}")
    x = torch.ones(1, 4)
    equal = [torch.equal(a(x), b(x)) for a, b in zip(layers(model), layers(loaded), strict=True)]
    assert equal == [a == b for a, b in zip(*scales, strict=True)]
    return all(equal)


KEYS = {"q_proj": 16, "layers.1.q_proj": 32}
assert same("layers.1.q_proj", "q_proj")
assert not same("q_proj", "layers.1.q_proj")

made(rank_pattern={"q_proj": 2, "layers.1.q_proj": 4})
try:
    PeftModel.from_pretrained(base(), sys.argv[1])
except RuntimeError as error:
    print("rank_pattern:", str(error).splitlines()[1].strip())
else:
    raise AssertionError("the ranks are those that were made")
PYTHON
