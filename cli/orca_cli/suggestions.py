"""Suggests names for an option or a command that is not there."""

from difflib import SequenceMatcher
from typing import Any

from typer._click.exceptions import NoSuchOption
from typer.core import TyperCommand, TyperGroup

ALIKE = 0.7  # of the names without their dashes, which click counts too: it takes --help for --model
ELSEWHERE = {"run": "'serve', 'chat'", "start": "'serve'", "ps": "'status'"}  # commands of other servers


class Commands(TyperGroup):
    """The commands. Typer suggests those that are spelled alike."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in ELSEWHERE and not ctx.resilient_parsing:  # which is how a shell asks
            ctx.fail(f"No such command {args[0]!r}. Did you mean {ELSEWHERE[args[0]]}?")
        return super().resolve_command(ctx, args)


class Command(TyperCommand):
    """A command that refuses an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except NoSuchOption as refused:
            known = [name for parameter in self.get_params(ctx) for name in parameter.opts if name.startswith("--")]
            refused.possibilities = [name for name in known if alike(refused.option_name, name)]  # click looks at three
            raise


def alike(given: str, known: str) -> bool:
    """Whether a typed name may be a slip for the other one."""
    given, known = given.lstrip("-"), known.lstrip("-")
    return known.startswith(given) or SequenceMatcher(None, given, known).ratio() >= ALIKE
