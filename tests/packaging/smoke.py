"""Whether an installed package works: a tiny model by name, its outputs beside stock attention's, its commands.

`python smoke.py [--native]` outside the checkout; with `--native` the CPU kernels must be in the wheel and serve.
"""

import argparse
import subprocess
import sys
import warnings
from typing import Any

import torch
import transformers

import adaattn_hf


def tiny_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="adaattn").eval()


def main() -> None:
    """Fails with a sentence where something does not work."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--native", action="store_true", help="the native CPU kernels must be there")
    options = parser.parse_args()

    model = tiny_model()
    ids = torch.arange(24).reshape(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        actual = model(input_ids=ids, attention_mask=mask).logits
        explanation = str(adaattn_hf.explain(model))
        model.set_attn_implementation("eager")
        expected = model(input_ids=ids, attention_mask=mask).logits
    difference = float((actual - expected)[mask.bool()].abs().max())
    if not difference < 1e-5:
        sys.exit(f"logits differ from eager attention by {difference:.1e}")
    if options.native:
        model.set_attn_implementation("adaattn_native")  # serves, or raises with its reasons
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask)
    subprocess.run([sys.executable, "-m", "adaattn_hf", "--help"], check=True, stdout=subprocess.DEVNULL)
    print(explanation)
    print(f"adaattn-hf {adaattn_hf.__version__} works; largest difference from eager {difference:.1e}")


if __name__ == "__main__":
    warnings.simplefilter("error", DeprecationWarning)
    main()
