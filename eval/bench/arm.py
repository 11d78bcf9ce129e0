"""One arm of a cell in a process of its own, in whatever environment has it: `PYTHON arm.py`, lines of JSON.

The first line in is the task, which `processes.py` makes; the line out says what runs. Then each line in is a number of
calls, and the line out the seconds of one and the peak of the process. Only AdaAttn's own arm needs AdaAttn.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np

SHOWN = ("adaattn-hf", "torch", "transformers", "onnxruntime", "optimum", "openvino", "nncf", "llama_cpp_python")
Work = tuple[Callable[[], list[Any]], dict[str, Any]]
"""What returns an array for each batch, and settings for the report."""


def _encoder(task: Any, model: Any, **settings: Any) -> Work:
    torch, key = import_module("torch"), "logits" if task["scores"] else "last_hidden_state"
    torch.set_grad_enabled(False)
    batches = [
        {name: torch.tensor(rows, dtype=torch.int64, device="cpu") for name, rows in batch.items()}
        for batch in task["batches"]
    ]
    return lambda: [model(**batch)[key] for batch in batches], settings


def of_transformers(task: Any) -> Work:
    """A model of Transformers, stock or ours; a causal one reads a prompt, or steps behind it."""
    torch, library = import_module("torch"), import_module("transformers")
    torch.set_num_threads(task["threads"])
    torch.set_grad_enabled(False)
    package: Any = import_module("adaattn_hf") if task["engine"].startswith("adaattn") else None
    loading = {"attn_implementation": task["engine"], "dtype": getattr(torch, task["dtype"]), **task["loading"]}
    model = getattr(library, task["class"]).from_pretrained(task["directory"], **loading).eval()
    prepared = package is not None and task["prepared"] and package.prepare(model) is not None
    if not task["causal"]:
        return _encoder(task, model)
    ids, static = torch.tensor(task["texts"], dtype=torch.int64, device="cpu"), "StaticCache" in task["how"]
    kind = library.StaticCache if static else package.GrowingCache if prepared else library.DynamicCache
    sizes = {"max_cache_len": ids.shape[1] + task["room"]} if static else {}

    def read(tokens: Any, past: Any = None) -> list[Any]:
        past = past or kind(config=model.config, **sizes)
        return [model(tokens, past_key_values=past, use_cache=True, logits_to_keep=1).logits[:, -1], past]

    past = read(ids)[1] if task["step"] else None
    return lambda: read(ids[:, :1] if task["step"] else ids, past)[:1], {}


def of_optimum(task: Any) -> Work:
    """An encoder in ONNX Runtime or OpenVINO by optimum, as in sentence-transformers' backends.

    Bytes are dynamic in ONNX Runtime, and calibrated on the cell's own texts in OpenVINO.
    """
    onnx, small, place = task["engine"] == "onnxruntime", task["variant"] == "int8", Path(task["exported"])
    library = import_module("optimum.onnxruntime" if onnx else "optimum.intel")
    kind = f"{'ORT' if onnx else 'OV'}ModelFor{'SequenceClassification' if task['scores'] else 'FeatureExtraction'}"
    load = getattr(library, kind).from_pretrained
    if task["export"]:
        model = load(task["directory"], export=True)
        model.save_pretrained(place)
        if onnx and small:
            kinds = import_module("optimum.onnxruntime.configuration").AutoQuantizationConfig
            how = kinds.avx512_vnni(is_static=False, per_channel=False)
            library.ORTQuantizer.from_pretrained(place, "model.onnx").quantize(how, save_dir=place)
        elif small:
            rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in task["texts"]]
            how = library.OVConfig(quantization_config=library.OVQuantizationConfig())
            data = import_module("datasets").Dataset.from_list(rows)
            library.OVQuantizer.from_pretrained(model).quantize(data, place, how)
        return list, {}
    if onnx:
        options, file = import_module("onnxruntime").SessionOptions(), f"model{'_quantized' * small}.onnx"
        options.intra_op_num_threads = task["threads"]
        return _encoder(task, load(place, file_name=file, session_options=options), file=file)
    model = load(place, ov_config={"INFERENCE_NUM_THREADS": task["threads"]})
    model.compile()
    ready = model.request if hasattr(model.request, "get_property") else model.request.get_compiled_model()
    return _encoder(task, model, precision=ready.get_property("INFERENCE_PRECISION_HINT").get_type_name())


def of_llama(task: Any) -> Work:
    """A file of llama.cpp as it is: it reads a prompt, or steps behind it."""
    library, (ids,), step = import_module("llama_cpp"), task["texts"], task["step"]
    settings = {"n_ctx": len(ids) + task["room"], "flash_attn": task["variant"] != "plain"}
    settings |= dict.fromkeys(("n_threads", "n_threads_batch"), task["threads"])
    model = library.Llama(task["gguf"], verbose=False, **settings)

    def read(tokens: list[int], past: int) -> list[Any]:
        model.n_tokens = past
        model.eval(tokens)
        return [np.ctypeslib.as_array(library.llama_get_logits_ith(model.ctx, -1), (1, model.n_vocab()))]

    if step:
        read(ids, 0)
    settings |= {"n_batch": model.n_batch, "file": Path(task["gguf"]).name}
    return lambda: read(ids[:1] if step else ids, model.n_tokens if step else 0), settings


def peak_bytes() -> int:
    """Bytes that the process held at its peak; on Linux `getrusage` would begin with those of its parent."""
    status = Path("/proc/self/status")
    if not status.exists():  # macOS
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * int(status.read_text(encoding="utf-8").partition("VmHWM:")[2].split()[0])


def main() -> None:
    """Does the task, and times it as often as it is asked."""
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # libraries print where they like
    task = json.loads(sys.stdin.readline())
    kinds = {"onnxruntime": of_optimum, "openvino": of_optimum, "llama.cpp": of_llama}
    work, settings = kinds.get(task["engine"], of_transformers)(task)
    np.savez(task["answer"], *(one.float().numpy() if hasattr(one, "float") else one for one in work()))
    versions = {one.name: one.version for one in metadata.distributions() if one.name in SHOWN}
    out.write(json.dumps({"versions": versions, **settings}) + "\n")
    for calls in map(int, sys.stdin):
        began, used = time.perf_counter(), time.process_time()
        for _ in range(calls):
            work()
        wall, process = time.perf_counter() - began, time.process_time() - used
        out.write(json.dumps({"wall": wall / calls, "process": process / calls, "peak_bytes": peak_bytes()}) + "\n")


if __name__ == "__main__":
    main()
