"""A model behind HTTP, with OpenAI's protocol, metrics, and a page that shows the experts.

`moecache serve` is made of these parts: `requests` reads what a client asks for, `engine` answers
some requests at a time, `answer` writes each down, `app` has the routes, `server` the sockets, and
`front` answers before there is a model.
"""

import importlib.util

from moecache.errors import MissingDependencyError


def check_serving() -> None:
    """Raise a MissingDependencyError unless what serving any model needs is installed."""
    needed = ("starlette", "uvicorn", "prometheus_client")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"serving needs {', '.join(missing)}; install it with: pip install 'moecache[serve]'"
        )
