"""vLLM's gRPC services through Python's grpcio, with messages made from vLLM's own schema.

    python testing/fleet/grpc_client.py --dacapo target/release/dacapo --cache .cache/fleet --schema FOLDER
"""

import argparse
import importlib
import json
import os
import sys
import threading
import urllib.request

import grpc
import grpc_tools
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_tools import protoc

from workers import Worker, free_port, until

parser = argparse.ArgumentParser()
parser.add_argument("--dacapo", required=True)
parser.add_argument("--cache", required=True)
parser.add_argument("--schema", required=True)
args = parser.parse_args()

made = os.path.join(args.cache, "proto")
os.makedirs(made, exist_ok=True)
builtin = os.path.join(os.path.dirname(grpc_tools.__file__), "_proto")
names = ["inference.proto", "control.proto"]
command = ["protoc", f"-I{args.schema}", f"-I{builtin}", f"--python_out={made}", f"--grpc_python_out={made}", *names]
assert protoc.main(command) == 0, "the schema cannot be compiled"
sys.path.insert(0, made)
inference, inference_grpc, control, control_grpc = (
    importlib.import_module(name) for name in ["inference_pb2", "inference_pb2_grpc", "control_pb2", "control_pb2_grpc"]
)


def request(text, tokens, **more):
    return inference.GenerateRequest(
        text=text,
        temperature=0,
        stopping=inference.StoppingCriteria(max_new_tokens=tokens, ignore_eos=True),
        response=inference.ResponseOptions(output_token_ids=True),
        **more,
    )


def code(call):
    """The status that a call fails with."""
    try:
        answer = call()
        if not isinstance(answer, inference.GenerateResponse):
            list(answer)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


address = f"127.0.0.1:{free_port()}"
events = free_port()
worker = Worker(
    args.dacapo,
    args.cache,
    ["--grpc", address, "--api-key", "sesame", "--kv-events", f"tcp://127.0.0.1:{events}", "--limit", "body_bytes=65536"],
).ready()
key = [("authorization", "Bearer sesame")]
channel = grpc.insecure_channel(address)
calls, asked = inference_grpc.InferenceStub(channel), control_grpc.ControlStub(channel)
health = health_pb2_grpc.HealthStub(channel)

serving = health_pb2.HealthCheckResponse.SERVING
assert health.Check(health_pb2.HealthCheckRequest(service="vllm.Inference")).status == serving
assert code(lambda: calls.Generate(request("x", 1))) == grpc.StatusCode.UNAUTHENTICATED

server = asked.GetServerInfo(control.GetServerInfoRequest(), metadata=key)
model = asked.GetModelInfo(control.GetModelInfoRequest(), metadata=key)
sources = asked.GetKvEventSources(control.GetKvEventSourcesRequest(), metadata=key).sources
assert server.api_version == "vllm" and server.kv_block_size == 16 and server.total_kv_blocks > 0, server
assert model.supports_token_ids_input and model.served_model_name, model
assert [source.endpoint for source in sources] == [f"tcp://127.0.0.1:{events}"], sources

whole = calls.Generate(request("Hello, how are you?", 12), metadata=key).outputs
text, ids, ends = "", [], []
for part in calls.GenerateStream(request("Hello, how are you?", 12), metadata=key):
    assert part.outputs.num_tokens == len(part.outputs.token_ids)
    text += part.outputs.text
    ids += part.outputs.token_ids
    if part.outputs.HasField("finish_info"):
        ends.append(part.outputs.finish_info)
assert (text, ids) == (whole.text, list(whole.token_ids)), "a stream says what a whole answer says"
assert len(ids) == 12 and [end.num_output_tokens for end in ends] == [12], ends
assert ends[0].finish_reason == inference.FinishInfo.LENGTH
body = {"prompt": "Hello, how are you?", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
asked_http = urllib.request.Request(
    worker.url + "/v1/completions",
    json.dumps(body).encode(),
    {"content-type": "application/json", "authorization": "Bearer sesame"},
)
with urllib.request.urlopen(asked_http) as answer:
    assert json.load(answer)["choices"][0]["text"] == text, "HTTP says the same"

assert code(lambda: calls.Generate(request("x" * 70_000, 1), metadata=key)) == grpc.StatusCode.RESOURCE_EXHAUSTED
assert code(lambda: calls.Generate(request("x", 1, model="other"), metadata=key)) == grpc.StatusCode.NOT_FOUND


def in_flight():
    wanted = urllib.request.Request(worker.url + "/metrics", headers={"authorization": "Bearer sesame"})
    with urllib.request.urlopen(wanted) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("dacapo_requests_in_flight "))


stream = calls.GenerateStream(request("long", 1500), metadata=key)
next(stream)
assert in_flight() == 1
stream.cancel()
until("a cancelled request ends", lambda: in_flight() == 0)
late = lambda: calls.GenerateStream(request("long", 1900), metadata=key, timeout=0.05)
assert code(late) == grpc.StatusCode.DEADLINE_EXCEEDED
until("a request ends with its deadline", lambda: in_flight() == 0)
stream = calls.GenerateStream(request("long", 1500, request_id="mine"), metadata=key)
next(stream)
asked.Abort(control.AbortRequest(request_ids=["mine"]), metadata=key)
last = list(stream)[-1].outputs.finish_info
assert last.finish_reason == inference.FinishInfo.ABORTED, last

# A server that leaves says so, and finishes what it has begun.
states = []
watch = threading.Thread(
    target=lambda: states.extend(s.status for s in health.Watch(health_pb2.HealthCheckRequest())), daemon=True
)
watch.start()
stream = calls.GenerateStream(request("long", 200), metadata=key)
next(stream)
until("the watch has begun", lambda: states)
worker.drain()
assert list(stream)[-1].outputs.finish_info.num_output_tokens == 200
watch.join(timeout=30)
assert states[-1] == health_pb2.HealthCheckResponse.NOT_SERVING, states
worker.ended()
print("grpc: ok")
