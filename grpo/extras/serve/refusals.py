"""Turns every error of the server into the form of OpenAI's API, or Anthropic's on its paths, with one line as its message."""

from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from grpo.extras.serve.batching import Unavailable
from grpo.extras.serve.dialects.anthropic import ANTHROPIC
from grpo.extras.serve.dialects.chat import CHAT
from grpo.extras.serve.limits import Crowded, Oversized
from grpo.extras.serve.served_weights import Outside
from grpo.extras.serve.service import Unknown
from grpo.system.errors import UserError, error_line


def failure(status: int, line: str, headers: Mapping[str, str] | None = None, path: str = "") -> JSONResponse:
    """Return the answer to a request that failed. line: what was wrong, what is allowed, what to do. path: of the request."""
    dialect = ANTHROPIC if path.startswith("/v1/messages") else CHAT
    return JSONResponse(dialect.failure(status, line), status, headers)


def refuse(app: FastAPI) -> None:
    """Answer every exception in the application with a `failure`."""

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> JSONResponse:
        wanted = f"{request.method} {request.scope['path'][:80]}"
        lines = {"Not Found": f"there is no {wanted}", "Method Not Allowed": f"{wanted} is not possible"}
        line = f"{lines[error.detail]}: GET / lists the endpoints" if error.detail in lines else error.detail
        return failure(error.status_code, line, error.headers, request.scope["path"])

    answers = {
        UserError: (400, str, None),
        Unknown: (404, str, None),
        RequestValidationError: (400, lambda _: "the request is not JSON", None),
        Oversized: (413, str, None),
        Outside: (403, str, None),
        Crowded: (429, str, {"Retry-After": "5"}),
        Unavailable: (503, str, None),
        Exception: (500, error_line, None),
    }
    for kind, (status, words, headers) in answers.items():

        def answer(request: Request, error: Exception, status=status, words=words, headers=headers) -> JSONResponse:
            return failure(status, words(error), headers, request.scope["path"])

        app.exception_handler(kind)(answer)
