"""`python -m launcher.models.convert FOLDER FILE OUT`: a GGUF file in FOLDER → float32 safetensors in OUT.

A process of its own, so that the launcher never holds torch and the weights in its memory.
"""

import sys
from pathlib import Path
from typing import Any

EOS_TOKEN_ID = 2


def convert(folder: str, file: str, out: str) -> None:
    """Raises `ValueError` where the result lacks what serving needs: the end-of-sequence id and the chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

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
