"""Import from and export to Hugging Face: GPT-2, BERT, ViT, Marian, BART and T5.

    from regard.interop import import_folder, export_folder
    model, tokenizers = import_folder("gpt2")        # config.json, model.safetensors, tokenizer.json
    export_folder(model, "out", tokenizers)          # AutoModelForCausalLM.from_pretrained("out")

The six architectures are one model with different settings, which one class per family lists. Read `gpt2` first, then
`rules` and `family`, which all of them use. transformers itself is needed only for `compare`, which runs both models
and reports the largest difference.
"""

from regard.interop.check import Difference, compare
from regard.interop.folder import Imported, export_folder, import_folder, read_folder

__all__ = ["Difference", "Imported", "compare", "export_folder", "import_folder", "read_folder"]
