"""Llama 4's text model under Transformers' tests of causal language models, which its own file does not run.

Chunked and full layers take turns, and a chunk is shorter than the test's sequences.
"""

import unittest

from transformers import Llama4ForCausalLM, Llama4TextConfig, Llama4TextModel

from ...causal_lm_tester import CausalLMModelTest, CausalLMModelTester


class Llama4TextModelTester(CausalLMModelTester):
    base_model_class = Llama4TextModel
    config_class = Llama4TextConfig
    causal_lm_class = Llama4ForCausalLM

    def __init__(self, parent):
        super().__init__(
            parent, intermediate_size_mlp=37, num_local_experts=4, attention_chunk_size=4,
            layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0],
        )  # fmt: skip


class Llama4TextModelTest(CausalLMModelTest, unittest.TestCase):
    model_tester_class = Llama4TextModelTester
