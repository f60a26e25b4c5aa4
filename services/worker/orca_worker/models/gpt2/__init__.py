"""GPT-2.

configuration.py   its config.json
slices.py          which part of each tensor a rank holds
layers.py          embedding, Transformer layer, head
model.py           the layers of one stage
family.py          what the rest of a rank asks of the family
"""
