#!/usr/bin/env python3
"""Replaces the weights of a server by tensors that this process has in memory, without a file between.

    python tools/update_weights.py http://127.0.0.1:8000 FOLDER [--times 5]     # a GPU: CUDA IPC handles
    python tools/update_weights.py http://127.0.0.1:8000 FOLDER --device cpu    # a CPU: a file in /dev/shm

FOLDER has safetensors of the model that is served; they are loaded here first, as a trainer has them, and the update is timed. The
server needs `--admin-api`, and for a CPU `--weight-root /dev/shm`. A trainer imports `tensor_places` and `update`:

    update("http://127.0.0.1:8000", tensor_places(dict(model.named_parameters())))

Tensors must be contiguous, have the names of the checkpoint, and stay as they are until the answer comes.
"""

import argparse
import json
import pathlib
import tempfile
import time
import urllib.error
import urllib.request

import torch

TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def tensor_places(tensors):
    """What a server needs to find CUDA tensors of this process, and waits until they are computed."""
    torch.cuda.synchronize()
    places = []
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
        tensor = tensor.detach()
        # The handle is that of the allocator's block; the storage lies somewhere in it. Newer versions of torch put the kind
        # of handle in front of it.
        _, handle, _, offset, *_ = tensor.untyped_storage()._share_cuda_()
        offset += tensor.storage_offset() * tensor.element_size()
        places.append({"name": name, "dtype": TYPES[tensor.dtype], "shape": list(tensor.shape),
                       "handle": bytes(handle)[-64:].hex(), "offset": offset})
    return places


def write_shared(tensors, folder="/dev/shm"):
    """The same for tensors on the CPU: writes them to a file in shared memory, which the caller deletes afterwards."""
    file = tempfile.NamedTemporaryFile(dir=folder, prefix="weights-", delete=False)
    places = []
    with file:
        for name, tensor in tensors.items():
            raw = tensor.detach().contiguous().view(torch.uint8).numpy()
            places.append({"name": name, "dtype": TYPES[tensor.dtype], "shape": list(tensor.shape),
                           "path": file.name, "offset": file.tell()})
            file.write(raw.data)
    return places


def update(url, places, mode="wait"):
    """Replaces the weights; returns the server's answer."""
    body = json.dumps({"tensors": places, "mode": mode}).encode()
    request = urllib.request.Request(f"{url}/update_weights", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code}: {error.read().decode()}") from None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    from safetensors.torch import load_file

    tensors = {}
    for file in sorted(args.folder.glob("*.safetensors")):
        tensors.update(load_file(file, device=args.device))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    places = tensor_places(tensors) if args.device == "cuda" else write_shared(tensors)
    try:
        for _ in range(args.times):
            began = time.monotonic()
            answer = update(args.url, places)
            seconds = time.monotonic() - began
            print(f"{len(places)} tensors, {size / 1e9:.2f} GB in {seconds:.3f} s: version {answer['weight_version']}")
    finally:
        for path in {place["path"] for place in places if "path" in place}:
            pathlib.Path(path).unlink()


if __name__ == "__main__":
    main()
