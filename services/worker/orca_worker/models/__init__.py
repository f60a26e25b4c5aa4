"""The models, in families: `model.py` says what a model is, `families.py` lists the families."""
