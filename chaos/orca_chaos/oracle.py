"""The right answer to each request, learned from the target itself before the first fault."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orca.v1 import orca_pb2 as pb

from .client import Caller, Stream

REQUESTS = 24  # different ones; the load repeats them
INPUT, OUTPUT = (1, 48), (16, 48)  # tokens


@dataclass(frozen=True)
class Known:
    """A request without its id, and the tokens that must follow its prompt."""

    request: pb.GenerateRequest
    tokens: tuple[int, ...] = ()


def requests(seed: int, vocabulary: int, positions: int, count: int = REQUESTS) -> list[Known]:
    """Random prompts: half of them greedy, half sampled with a seed, of which half with penalties and biases too."""
    draw = random.Random(f"requests {seed}")
    longest = max(1, min(OUTPUT[1], positions - INPUT[1]))
    made = []
    for n in range(count):
        prompt = [draw.randrange(vocabulary) for _ in range(draw.randint(*INPUT))]
        sampling = pb.Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=draw.getrandbits(63))
        if n % 4 == 3:  # what depends on the tokens before must be the same after a recovery
            sampling.repetition_penalty, sampling.presence_penalty = 1.3, -0.5
            sampling.frequency_penalty, sampling.min_p = 0.7, 0.02
            sampling.logit_bias[draw.randrange(vocabulary)] = 3.0
        output = draw.randint(min(OUTPUT[0], longest), longest)
        made.append(
            Known(
                pb.GenerateRequest(
                    token_ids=pb.TokenIds(ids=prompt),
                    max_new_tokens=output,
                    sampling=sampling if n % 2 else None,
                    ignore_eos=True,
                )
            )
        )
    return made


async def undisturbed(caller: Caller, asked: Sequence[Known]) -> list[Known]:
    """The requests with their tokens. Each runs alone: what follows a fault is another batch, and must be the same."""
    known = []
    for one in asked:
        stream = Stream(caller, one.request)
        await stream.run()
        known.append(replace(one, tokens=tuple(stream.tokens)))
    return known


async def learn(caller: Caller, seed: int, count: int = REQUESTS) -> list[Known]:
    """Requests for the model that is served, with the tokens of an undisturbed run."""
    model = await caller.model()
    asked = requests(seed, model.vocab_size, model.max_positions, count)
    async with asyncio.timeout(300):
        return await undisturbed(caller, asked)
