"""Scheduling policies by name, and how one is written: the name of a set, and parts that differ from it.

`balanced,positions=128` is the set `balanced` with another budget of positions. A further policy is one class in one
file and a line in `POLICIES`. `auto` stands for what `fitting` finds for a model.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from orca_common.protocol import GROWN, OUTPUTS, PARTS, SHARED

from .drafting import with_drafts
from .fills import FILLS, IN_PARTS
from .memory import Memory, Slots
from .on_demand import OnDemand
from .policy import Policy
from .request import Request
from .selection import Limits, Plan, select

PARTS_OF_A_POLICY = ("fill", "kv", "positions", "prefix", "drafts")
BY_TIME = "auto:"  # before milliseconds
AUTO = "auto"  # a policy that `fitting` finds
POSITIONS = 256  # where no number is given; with BY_TIME until iterations have been measured
POSITIONS_OF_AUTO = 128, 512  # without and with a run-ahead, as on GPUs, where nothing was measured
DRAFTS = ("off", "ngram")
PREFIXES = ("off", "tenant", "shared")
MEMORIES: dict[str, type[Slots]] = {"reserve": Slots, "on-demand": OnDemand}


@dataclass(frozen=True, slots=True)
class FirstCome:
    """Policies that serve who came first. Without parameters it is Algorithm 1 of the paper.

    Raises ValueError where the parts do not go together.
    """

    fill: str = "paper"  # how an iteration is filled: of FILLS
    kv: str = "reserve"  # slots for all tokens at the first iteration, or blocks as they are needed: of MEMORIES
    positions: int | None = None  # of an iteration: what prompts in parts are cut by
    seconds: float | None = None  # that an iteration may take: `positions` are those at first
    prefix: str = "off"  # who begins with whose keys and values: of PREFIXES
    drafts: str = "off"  # tokens that are guessed and verified: of DRAFTS

    def __post_init__(self) -> None:
        for part, value, known in (
            ("fill", self.fill, FILLS),
            ("kv", self.kv, MEMORIES),
            ("prefix", self.prefix, PREFIXES),
            ("drafts", self.drafts, DRAFTS),
        ):
            if value not in known:
                raise ValueError(f"policy: {part}={value} is not there; there are: {', '.join(known)}")
        if self.fill in IN_PARTS and self.positions is None:
            raise ValueError(f"policy: fill={self.fill} needs positions, the bound of an iteration")
        if self.fill not in IN_PARTS and self.positions is not None:
            fills = " and ".join(sorted(IN_PARTS))
            raise ValueError(f"policy: positions={self.positions} is for {fills}: fill={self.fill} cuts no prompt")

    @property
    def name(self) -> str:
        """`paper`, or all the parts: a set may have others in another release, and a journal must replay."""
        if self == PAPER:
            return "paper"
        positions = self.positions if self.seconds is None else f"{BY_TIME}{round(self.seconds * 1e3)}"
        parts = {"fill": self.fill, "kv": self.kv, "positions": positions, "prefix": self.prefix, "drafts": self.drafts}
        return ",".join(f"{part}={value}" for part, value in parts.items() if value is not None)

    @property
    def needs(self) -> frozenset[str]:
        needs = {
            PARTS: self.fill in IN_PARTS,
            GROWN: self.kv == "on-demand",
            SHARED: self.prefix != "off",
            OUTPUTS: self.drafts != "off",
        }
        return frozenset(word for word, needed in needs.items() if needed)

    @property
    def reserves_output(self) -> bool:
        return self.kv == "reserve"

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.arrived.arrival,)

    def memory(self, n_slots: int, block_size: int) -> Memory:
        return MEMORIES[self.kv](n_slots, block_size)

    def plan(self, ready: Iterable[Request], live: Sequence[Request], limits: Limits, memory: Memory) -> Plan:
        if self.fill == "paper" and self.kv == "reserve":  # as the paper has it; `first_come` makes the same plan
            plan = select(ready, limits, memory)
        else:
            plan = FILLS[self.fill](ready, live, limits, memory)
        return plan if self.drafts == "off" else with_drafts(plan, limits, memory)

    def violations(self, requests: Sequence[Request], memory: Memory) -> list[str]:
        return [*memory.violations(requests), *self._out_of_order(requests)]

    def _out_of_order(self, requests: Sequence[Request]) -> list[str]:
        """Iteration-level FCFS. Where prompts run in parts or begin again, it is about the end of initiations."""
        pairs = pairwise([r for r in requests if r.in_order and (r.goes_on or not r.running)])
        if self.fill in ("paper", "even") and self.kv == "reserve":
            return [
                f"claim {b.claim} ran {b.iterations} iterations, claim {a.claim} before it {a.iterations}"
                for a, b in pairs
                if b.iterations > a.iterations
            ]
        if self.fill == "split-fuse" or self.kv == "on-demand":
            return []  # a request that began again, or a later prompt that is shorter, may be first
        return [
            f"claim {b.claim} ended its initiation, claim {a.claim} before it did not"
            for a, b in pairs
            if b.initiated and not a.initiated
        ]


PAPER = FirstCome()
POLICIES: dict[str, Policy] = {
    "paper": PAPER,
    "even": FirstCome("even"),
    "stall-free": FirstCome("stall-free", positions=POSITIONS),
    "split-fuse": FirstCome("split-fuse", positions=POSITIONS),
    "balanced": FirstCome("stall-free", "on-demand", POSITIONS),
}


def fitting(can: Collection[str], max_bs: int, run_ahead: int) -> FirstCome:
    """The policy `auto`: each part that is best on most loads (docs/policies.md#which-one), where a model can do it.

    can: words of orca_common.protocol, of what the model's ranks can do; with none of them it is Algorithm 1.
    """
    parts = FirstCome("stall-free", positions=max(POSITIONS_OF_AUTO[run_ahead], 4 * max_bs)) if PARTS in can else PAPER
    return replace(
        parts,
        kv="on-demand" if GROWN in can else "reserve",
        prefix="tenant" if SHARED in can else "off",
        drafts="ngram" if OUTPUTS in can and not run_ahead else "off",
    )


def policy_named(text: str) -> Policy:
    """Returns the policy that a text describes. Raises ValueError, which says what there is."""
    words = text.split(",")
    named = [word for word in words[:1] if "=" not in word]
    if named == [AUTO]:
        raise ValueError(
            f"policy: {text!r}: {AUTO} stands alone and follows from the model as an engine forms; "
            f"sets that are known before are {', '.join(sorted(POLICIES))}"
        )
    if named and named[0] not in POLICIES:
        raise ValueError(f"policy: there is no {named[0]!r}; there are: {', '.join(sorted((AUTO, *POLICIES)))}")
    policy = POLICIES[named[0]] if named else PAPER
    changes = dict[str, str | int | float | None]()
    for word in words[len(named) :]:
        part, equals, value = word.partition("=")
        if not equals or part not in PARTS_OF_A_POLICY or not isinstance(policy, FirstCome):
            raise ValueError(
                f"policy: {word!r} is no part of {named[0] if named else 'it'}: {'=, '.join(PARTS_OF_A_POLICY)}="
            )
        if part in changes:
            raise ValueError(f"policy: {part} stands twice in {text!r}")
        changes |= _positions(value) if part == "positions" else {part: value}
    if isinstance(policy, FirstCome) and "positions" not in changes and changes.get("fill") in FILLS:
        in_parts = changes["fill"] in IN_PARTS  # positions belong to a fill
        changes |= {"positions": policy.positions or POSITIONS} if in_parts else {"positions": None, "seconds": None}
    return replace(policy, **changes) if changes else policy  # pyright: ignore[reportCallIssue, reportArgumentType]


def _positions(text: str) -> dict[str, int | float | None]:
    """A number of positions, or the time that an iteration may take."""
    number = text.removeprefix(BY_TIME)
    if not (number.isascii() and number.isdecimal() and len(number) < 9 and int(number) > 0):
        raise ValueError(
            f"policy: positions={text} must be a whole number from 1 to 99999999, or {BY_TIME} and milliseconds"
        )
    if text == number:
        return {"positions": int(number), "seconds": None}
    return {"positions": POSITIONS, "seconds": int(number) / 1e3}
