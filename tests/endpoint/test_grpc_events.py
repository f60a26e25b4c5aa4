"""Events as messages: one encoder makes of each token what a message of its own would be."""

from hypothesis import given, settings
from hypothesis import strategies as st

from orca.v1.orca_pb2 import GenerateResponse
from orca_endpoint.calls.events import Token, TopToken
from orca_endpoint.grpc.answers import Encoder, token_message

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


@settings(deadline=None)
@given(st.lists(TOKENS))
def test_each_token_is_encoded_as_if_it_were_the_first(tokens: list[Token]) -> None:
    encoder = Encoder()
    for token in tokens:
        made = GenerateResponse.FromString(encoder.encode(token))
        assert made == GenerateResponse(tokens=[token_message(token)])
