"""The families of models, and their weights. `families.py` lists them; `iteration/model.py` has their interface."""
