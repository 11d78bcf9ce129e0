"""The family under RoBERTa's tests, whose code it shares; its own file has none that make a model."""

from ..roberta.roberta_like import declared

XLMRobertaModelTest = declared("XLMRoberta")
