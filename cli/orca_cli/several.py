"""Options with several numbers, as in 8,16,32."""

from math import inf

import typer


def numbers(option: str, text: str, count: int | None = None, positive: bool = True) -> list[float]:
    """Numbers and commas: `count` of them where it is given, each above 0 if `positive`. Raises typer.BadParameter."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or count not in (None, len(found)) or (positive and not all(0 < one < inf for one in found)):
        what = "numbers above 0" if positive else "numbers"
        raise typer.BadParameter(f"must be {what} and commas, as in 1,2,4", param_hint=option)
    return found


def whole(option: str, text: str | None) -> list[int]:
    """Whole numbers above 0, and commas; nothing where nothing was given. Raises typer.BadParameter."""
    found = numbers(option, text) if text is not None else []
    if any(one != int(one) for one in found):
        raise typer.BadParameter("must be whole numbers above 0, as in 8,16", param_hint=option)
    return [int(one) for one in found]
