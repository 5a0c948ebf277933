"""Run llama.cpp's server for the tiny Qwen3 of a directory, after writing it as a GGUF file.

    python llama_server.py FOLDER FILE.gguf PORT

It runs in an environment of its own, which has `xllamacpp` and `gguf`, and ends with the process.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy
import xllamacpp

SLOTS, CONTEXT = 8, 1024


def tensors(file: Path) -> Iterator[tuple[str, Any]]:
    """Return the names and arrays of a safetensors file, with 32 bits each."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    for name, described in json.loads(data[8:begin]).items():
        if name != "__metadata__":
            assert described["dtype"] == "F32"
            first, last = described["data_offsets"]
            flat = numpy.frombuffer(data[begin + first : begin + last], numpy.float32)
            yield name, flat.reshape(described["shape"])


def write(folder: Path, file: Path) -> None:
    config, tokenizer = (json.loads((folder / name).read_text("utf-8")) for name in ("config.json", "tokenizer.json"))
    out = gguf.GGUFWriter(str(file), "qwen3")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_key_length(config["head_dim"])
    out.add_value_length(config["head_dim"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_file_type(gguf.LlamaFileType.ALL_F32)
    tokens = {number: (f"[PAD{number}]", gguf.TokenType.UNUSED) for number in range(config["vocab_size"])}
    tokens |= {number: (text, gguf.TokenType.NORMAL) for text, number in tokenizer["model"]["vocab"].items()}
    for added in tokenizer["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]] = added["content"], kind
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list([tokens[number][0] for number in sorted(tokens)])
    out.add_token_types([tokens[number][1] for number in sorted(tokens)])
    out.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    out.add_eos_token_id(config["eos_token_id"])
    out.add_pad_token_id(config["pad_token_id"])
    out.add_add_bos_token(False)
    out.add_chat_template((folder / "chat_template.jinja").read_text("utf-8"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, array in tensors(folder / "model.safetensors"):
        out.add_tensor(names.get_name(name, try_suffixes=(".weight",)), array)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def main() -> None:
    folder, file, port = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    write(folder, file)
    asked = xllamacpp.CommonParams()
    asked.model.path = str(file)
    asked.model_alias = {"tiny"}
    asked.hostnames, asked.port = ["127.0.0.1"], port
    asked.n_parallel, asked.n_ctx = SLOTS, SLOTS * CONTEXT
    server = xllamacpp.Server(asked)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
