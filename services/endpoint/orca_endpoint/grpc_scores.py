"""The logprobs that a request may ask for beyond those of its tokens, as messages of orca.v1."""

from orca.v1.orca_pb2 import PromptToken, TopToken
from orca.v1.orca_pb2 import Token as TokenMessage

from . import events


def token_message(event: events.Token) -> TokenMessage:
    """A token with the most probable ones at its place."""
    index, token_id, text, logprob, iteration, engine, top = event
    return TokenMessage(
        index=index,
        token_id=token_id,
        text=text,
        logprob=logprob,
        iteration=iteration,
        engine=engine,
        top=top_messages(top),
    )


def prompt_messages(event: events.Prompted) -> list[PromptToken]:
    return [
        PromptToken(token_id=token_id, text=text, logprob=logprob, top=top_messages(top))
        for token_id, text, logprob, top in event.tokens
    ]


def top_messages(top: tuple[events.TopToken, ...]) -> list[TopToken]:
    return [TopToken(token_id=token_id, text=text, logprob=logprob) for token_id, text, logprob in top]
