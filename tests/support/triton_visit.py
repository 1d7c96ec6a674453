"""What a user of NVIDIA's tritonclient does, as a program: prints what it got as JSON.

A process of its own, because the client registers the same protobuf package as our own stubs of
the protocol do.

    python triton_visit.py HOST:PORT MODEL PROMPT
"""

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

PARAMS = {"max_tokens": 7, "temperature": 0.7, "seed": 11, "ignore_eos": True}


def text_input(name: str, text: str) -> triton.InferInput:
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    return tensor


def truth(name: str, value: bool) -> triton.InferInput:
    tensor = triton.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


def ids_input(ids: list[int]) -> triton.InferInput:
    tensor = triton.InferInput("input_ids", [1, len(ids)], "INT32")
    tensor.set_data_from_numpy(np.array([ids], dtype=np.int32))
    return tensor


def params_input(**changes: Any) -> triton.InferInput:
    return text_input("sampling_parameters", json.dumps({**PARAMS, **changes}))


def texts(result: Any, name: str = "text_output") -> list[str]:
    return [value.decode() for value in result.as_numpy(name)]


def streamed(client: Any, model: str, *batches: list[Any]) -> list[dict[str, Any]]:
    """The answers to several requests on one stream, in order."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    events: list[dict[str, Any]] = []
    for number, inputs in enumerate(batches):
        client.async_stream_infer(model, inputs, request_id=str(number))
        final = False
        while not final:
            result, error = answers.get(timeout=30)
            if error is not None:
                events.append({"error": str(error)})
                break
            response = result.get_response()
            final = response.parameters["triton_final_response"].bool_param
            events.append({"id": response.id, "text": texts(result), "final": final})
    client.stop_stream()
    return events


def error_of(client: Any, model: str, inputs: list[Any]) -> str:
    try:
        client.infer(model, inputs)
    except InferenceServerException as error:
        return f"{error.status()}: {error.message()}"
    return "no error"


def fields(message: Descriptor) -> dict[str, list[object]]:
    def name_of(field: FieldDescriptor) -> str:
        kind = field.message_type or field.enum_type
        return kind.full_name if kind is not None else ""

    return {
        field.name: [field.number, field.type, field.is_repeated, name_of(field)]
        for field in message.fields
    }


def main() -> None:
    address, model, prompt = sys.argv[1:]
    client = triton.InferenceServerClient(address)
    metadata = client.get_model_metadata(model)
    asked = [text_input("text_input", prompt), params_input()]
    excluded = [*asked, truth("exclude_input_in_output", True)]
    whole = client.infer(model, excluded)
    with_ids = client.infer(
        model,
        [ids_input([5, 6, 7]), params_input(), truth("exclude_input_in_output", True)],
        outputs=[triton.InferRequestedOutput(name) for name in ("text_output", "output_ids")],
    )
    several = client.infer(
        model, [text_input("text_input", prompt), params_input(n=3), *excluded[2:]]
    )
    result = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": [client.is_model_ready(model), client.is_model_ready("another")],
        "server": client.get_server_metadata().name,
        "inputs": [tensor.name for tensor in metadata.inputs],
        "outputs": [tensor.name for tensor in metadata.outputs],
        "text": texts(whole),
        "reason": texts(whole, "finish_reason"),
        "with_prompt": texts(client.infer(model, asked)),
        "ids": with_ids.as_numpy("output_ids").tolist(),
        "several": texts(several),
        "stream": streamed(
            client,
            model,
            [*asked, truth("stream", True)],
            [text_input("text_input", prompt), params_input(top_p=9.0)],
            excluded,
        ),
        "errors": {
            "twice": error_of(client, model, [*asked, ids_input([1])]),
            "unknown": error_of(client, model, [text_input("prompt", "x")]),
            "params": error_of(
                client, model, [asked[0], text_input("sampling_parameters", '{"heat": 1}')]
            ),
            "bound": error_of(client, model, [asked[0], params_input(temperature=-1)]),
            "model": error_of(client, "another", asked),
            "stream": error_of(client, model, [*asked, truth("stream", True)]),
        },
        "contract": {
            name: fields(message)
            for name, message in service_pb2.DESCRIPTOR.message_types_by_name.items()
        },
    }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
