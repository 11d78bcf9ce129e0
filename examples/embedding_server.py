"""Serve embeddings over HTTP: each request is one batch of short and long texts, of which no padding is computed.

    python examples/embedding_server.py [MODEL] [--port 8000]
    curl localhost:8000 -d '{"texts": ["a short text", "and one that goes on for longer"]}'

MODEL is a directory or a name on the Hub of an encoder (all-MiniLM-L6-v2, bge-small-en-v1.5, ...); without one, the
tiny BERT of the package is used, offline. Python's own server is enough to try it; put a real one in front of users.
"""

from __future__ import annotations

import argparse
import json
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import adaattn_hf
from adaattn_hf.backends.native.library import level_here
from adaattn_hf.eval.demo import demo_model_path

MOST_BYTES = 1 << 20


class Embedder:
    """A model that turns texts into unit vectors: the mean over their tokens."""

    def __init__(self, name: str) -> None:
        """Loads the model, and lets it run whole batches without their padding."""
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.model = AutoModel.from_pretrained(name, attn_implementation="adaattn").eval()
        if self.model.dtype == torch.float16:  # slow on a CPU; `adaattn doctor` says where else bfloat16 pays
            self.model.to(torch.bfloat16 if level_here() == "amx" else torch.float32)
        adaattn_hf.prepare(self.model)

    @torch.inference_mode()
    def __call__(self, texts: list[str]) -> Tensor:
        """Unit vectors `[texts, width]`."""
        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
        hidden = self.model(**batch).last_hidden_state
        weights = batch["attention_mask"][..., None].to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


class Handler(BaseHTTPRequestHandler):
    """Answers `{"texts": [...]}` by `{"embeddings": [[...], ...]}`."""

    embed: Embedder

    def do_POST(self) -> None:
        """Embed the texts of one request."""
        try:
            length = int(self.headers.get("Content-Length", 0))
            if not 0 < length <= MOST_BYTES:
                raise ValueError(f"the body has {length} bytes, expected up to {MOST_BYTES}")
            asked = json.loads(self.rfile.read(length))
            texts = asked.get("texts") if isinstance(asked, dict) else None
            if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
                raise ValueError('expected {"texts": ["...", ...]} with at least one text')
        except ValueError as error:  # json's errors are ValueErrors, too
            self.answer(HTTPStatus.BAD_REQUEST, {"error": str(error)})
            return
        self.answer(HTTPStatus.OK, {"embeddings": self.embed(texts).tolist()})

    def answer(self, status: HTTPStatus, data: dict[str, object]) -> None:
        """Send JSON."""
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def make_server(name: str, port: int) -> HTTPServer:
    """A server of a model on this machine alone; port 0 takes a free one."""
    handler = type("Bound", (Handler,), {"embed": Embedder(name)})
    return HTTPServer(("127.0.0.1", port), handler)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(demo_model_path("bert")))
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    with make_server(options.model, options.port) as server:
        print(f"listening on http://127.0.0.1:{server.server_port}")
        server.serve_forever()


if __name__ == "__main__":
    main()
