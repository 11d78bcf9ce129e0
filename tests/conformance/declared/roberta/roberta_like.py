"""Families that share RoBERTa's code and have no tests of architecture of their own, under RoBERTa's tests."""

import unittest

import transformers

from . import test_modeling_roberta as roberta

HEADS = (
    "ForCausalLM", "ForMaskedLM", "Model", "ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice",
    "ForQuestionAnswering",
)  # fmt: skip


def declared(prefix):
    """Returns RoBERTa's test case about the classes of another family."""

    class Tester(roberta.RobertaModelTester):
        def get_config(self):
            stated = super().get_config().to_diff_dict()
            stated = {k: v for k, v in stated.items() if k not in ("model_type", "transformers_version")}
            return getattr(transformers, f"{prefix}Config")(**stated)

    class Case(roberta.RobertaModelTest):
        all_model_classes = tuple(getattr(transformers, prefix + head) for head in HEADS)

        def setUp(self):
            super().setUp()
            self.model_tester = Tester(self)

    return type(f"{prefix}ModelTest", (Case, unittest.TestCase), {})
