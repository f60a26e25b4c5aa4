"""Events as messages: an encoder makes of tokens that come together what messages of their own would be."""

from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from orca.v1.orca_pb2 import GenerateResponse
from orca_endpoint.calls.events import Accepted, Finished, Token, TopToken
from orca_endpoint.grpc.answers import MOST_KEPT, Encoder, token_message
from orca_pool.records import Reason

TEXTS = st.sampled_from(["", " a", "ü"])
TOKENS = st.builds(
    Token,
    st.integers(0, 3),
    st.integers(0, 3),
    TEXTS,
    st.none() | st.sampled_from([0.0, -0.5]),
    st.integers(0, 3),
    st.sampled_from(["", "engine-0", "engine-1"]),
    st.just(()) | st.just((TopToken(1, "x", -1.0),)),
)


@settings(max_examples=examples(100))
@given(st.lists(st.lists(TOKENS, min_size=1, max_size=2 * MOST_KEPT + 1)))
def test_each_token_is_encoded_as_if_it_were_the_first(pieces: list[list[Token]]) -> None:
    encoder = Encoder()
    for tokens in pieces:
        made = GenerateResponse.FromString(encoder.encode(tokens))
        assert made == GenerateResponse(tokens=map(token_message, tokens))


def test_what_comes_beside_tokens_is_in_their_message() -> None:
    encoder, token = Encoder(), Token(0, 5, " a", None, 7, "engine-0")
    for tokens in ([token], [token, token]):
        piece = [Accepted("r", 3, 0), *tokens, Finished(Reason.LENGTH, len(tokens), " b", None)]
        made = GenerateResponse.FromString(encoder.encode(piece))
        assert made.accepted.request_id == "r"
        assert made.tokens == [token_message(one) for one in tokens]
        assert made.finished.text == " b"
        assert GenerateResponse.FromString(encoder.encode(tokens)) == GenerateResponse(tokens=made.tokens)
