"""The HTTP server of llama-cpp-python before a model that takes no time; runs in the peer's Python.

    PEER_PYTHON bench/lanes/instant_llama_server.py PORT

The application is its own, as it comes. Only the model is left out: a completion is the chunks that
Llama._create_completion would yield, one a token, made without computing or detokenizing anything,
which flatters it. It answers one request at a time, so it can be asked for one stream only.
"""

import sys
from collections.abc import Iterator

import llama_cpp
import uvicorn
from llama_cpp.server import app as llama_app
from llama_cpp.server import model as llama_model
from llama_cpp.server.settings import ModelSettings, ServerSettings

WORD = " the"


def completion(_: object, *, max_tokens: int, **more: object) -> Iterator[dict[str, object]]:
    """In place of Llama.__call__."""
    for number in range(max_tokens):
        last = number == max_tokens - 1
        yield {
            "id": "cmpl-0e0e0e0e-0e0e-0e0e-0e0e-0e0e0e0e0e0e",
            "object": "text_completion",
            "created": 1,
            "model": "model",
            "choices": [
                {
                    "text": WORD,
                    "index": 0,
                    "logprobs": None,
                    "finish_reason": "length" if last else None,
                }
            ],
        }


def main() -> None:
    """Serve until the process is ended."""
    llama_model.LlamaProxy.load_llama_from_model_settings = staticmethod(lambda settings: object())
    llama_cpp.Llama.__call__ = completion
    application = llama_app.create_app(
        server_settings=ServerSettings(), model_settings=[ModelSettings(model="model")]
    )
    uvicorn.run(application, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")


if __name__ == "__main__":
    main()
