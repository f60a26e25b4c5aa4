"""The methods of the HTTP door, by their paths."""

from starlette.applications import Starlette

from ..calls.endpoint import Endpoint
from ..http.routing import MethodRoute, application
from .completions import Completions
from .pages import Pages
from .resumed import ResumedCompletion
from .tokens import Tokens


def methods(endpoint: Endpoint) -> Starlette:
    """Makes the application that serves them."""
    tokens = Tokens(endpoint)
    routes = [
        MethodRoute("/v1/completions", Completions(endpoint), "POST"),
        MethodRoute("/v1/completions/{id}", ResumedCompletion(endpoint), "GET", query=True),
        MethodRoute("/tokenize", tokens.tokenize, "POST"),
        MethodRoute("/detokenize", tokens.detokenize, "POST"),
        *Pages(endpoint).routes(),
    ]
    return application(routes, instead)


def instead(path: str, base: str) -> str:
    """Says which path to call instead of an unknown one. base: the door's address."""
    if path.startswith("/v1/chat"):
        return f"Orca serves completions, not chats; POST a prompt to {base}/v1/completions"
    return f"there is no such path; Orca serves completions, at {base}/v1/completions; {base}/docs lists all paths"
