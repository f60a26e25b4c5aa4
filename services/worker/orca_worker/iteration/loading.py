"""How far a rank has read its weights: minutes of a big model's start."""


class Loading:
    """Counted by the GPU thread; any thread may ask."""

    def __init__(self) -> None:
        self.read = 0  # bytes
        self.whole = 0  # bytes that will be read; 0: not known yet

    @property
    def sentence(self) -> str | None:
        """What is being read; None: nothing, or all is read."""
        read, whole = self.read, self.whole
        if read >= whole:
            return None
        size = f"{whole / 1e9:.1f} GB" if whole >= 1e9 else f"{whole / 1e6:.1f} MB"
        return f"{read / whole:.0%} of {size} of weights are read"
