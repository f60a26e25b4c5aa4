"""The HTTP door as a whole: its methods by their paths, and its description."""
