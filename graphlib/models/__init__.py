"""Language models from GGUF files: their graphs, tokenizers, tuning with LoRA, and text.

from ggrad import models

model = models.load("model.gguf")
logits = model.logits([1, 2, 3])  # [3, vocabulary]
"""

from .architecture import ARCHITECTURES, Architecture
from .model import Model, load

__all__ = ["ARCHITECTURES", "Architecture", "Model", "load"]
