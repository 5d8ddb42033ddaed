"""`python -m launcher.models.convert FOLDER FILE OUT`: a GGUF file in FOLDER → float32 safetensors in OUT.

A process of its own, so that the launcher never holds torch and the weights in its memory.
"""

import sys
from pathlib import Path
from typing import Any

from runtime.settings.machine import free_memory_bytes

EOS_TOKEN_ID = 2


def convert(folder: str, file: str, out: str) -> None:
    """Converts the model. Raises `ValueError` if the result lacks something that serving needs: the end-of-sequence id or the
    chat template."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    needed, free = 4 * sum(int(one.n_elements) for one in GGUFReader(Path(folder) / file).tensors), free_memory_bytes()
    if needed > free:
        raise ValueError(
            f"its weights take {needed / 1e9:.3g} GB as float32, and {free / 1e9:.3g} GB of memory are free"
        )
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, trust_remote_code=False
    )
    # The weights are plain float32 now; transformers would refuse to save what it thinks is quantized.
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config._name_or_path = ""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, trust_remote_code=False)
    if model.generation_config.eos_token_id != EOS_TOKEN_ID:
        raise ValueError(f"eos_token_id is {model.generation_config.eos_token_id}, not {EOS_TOKEN_ID}")
    if not tokenizer.chat_template:
        raise ValueError("the file has no chat template")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    if not (Path(out) / "model.safetensors").is_file():
        raise ValueError("no model.safetensors was written")


if __name__ == "__main__":
    convert(*sys.argv[1:4])
