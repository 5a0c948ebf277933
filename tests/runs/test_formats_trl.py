"""TRL itself takes the files; where it is installed, which CI does not do: it is no dependency, and torch is large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.runs.test_formats import loaded, made

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
trl = pytest.importorskip("trl")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A transformer of a few thousand parameters, and the tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(small_tokenizer_path())
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def options(folder: Path) -> dict[str, Any]:
    once = {"max_steps": 1, "per_device_train_batch_size": 2, "max_length": None}
    return {
        **once,
        "output_dir": str(folder / "out"),
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
    }


async def test_sft_trainer_uses_recorded_tokens_and_labels_unchanged(model: Path, tmp_path: Path) -> None:
    path, rows = await made("sft", tmp_path / "run")
    trainer = trl.SFTTrainer(str(model), args=trl.SFTConfig(**options(tmp_path)), train_dataset=loaded(path))
    for taken, row in zip(trainer.train_dataset, rows, strict=True):
        assert (taken["input_ids"], taken["labels"]) == (row["input_ids"], row["labels"])
    trainer.train()


async def test_preference_training_makes_of_messages_what_was_seen_and_said(model: Path, tmp_path: Path) -> None:
    path, _ = await made("dpo", tmp_path / "run")
    texts = loaded(path.with_name("dpo-text.jsonl"))
    trainer = trl.DPOTrainer(str(model), args=trl.DPOConfig(**options(tmp_path)), train_dataset=loaded(path))
    for taken, text in zip(trainer.train_dataset, texts, strict=True):
        decode = trainer.processing_class.decode
        assert decode(taken["prompt_ids"]) == text["prompt"]
        assert [decode(taken[f"{side}_ids"]).rstrip("\n") for side in ("chosen", "rejected")] == [
            text["chosen"],
            text["rejected"],
        ]
    trainer.train()


async def test_preference_training_masks_tool_results(model: Path, tmp_path: Path) -> None:
    """Fault 41: TRL's own mask is 1 for all behind the prompt."""
    from hermes_rl.errors import UserError
    from hermes_rl.integrations.trl import pairs_collator

    path, rows = await made("dpo", tmp_path / "run")
    arguments = trl.DPOConfig(**options(tmp_path), remove_unused_columns=False)
    trainer = trl.DPOTrainer(str(model), args=arguments, train_dataset=loaded(path), data_collator=pairs_collator(0))
    tokenizer, batch = trainer.processing_class, next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape == batch["completion_mask"].shape == batch["attention_mask"].shape
    lines = zip(batch["input_ids"], batch["completion_mask"], strict=True)
    written = [tokenizer.decode(ids[mask == 1]) for ids, mask in lines]
    expected = [row[f"{side}_labels"] for side in ("chosen", "rejected") for row in rows]
    assert sorted(written) == sorted(tokenizer.decode([one for one in line if one != -100]) for line in expected)
    assert "tool_response" in tokenizer.decode(batch["input_ids"][0]) and "tool_response" not in "".join(written)
    trainer.train()
    with pytest.raises(UserError, match="the pair of group g has no `chosen_labels`"):
        pairs_collator(0)([{"group": "g", "chosen_labels": None, "rejected_labels": None}])


async def test_unpaired_preferences_are_trained_on(model: Path, tmp_path: Path) -> None:
    from trl.data_utils import is_conversational

    path, rows = await made("kto", tmp_path / "run")
    table = loaded(path)
    assert is_conversational(table[0])
    config = trl.KTOConfig(**options(tmp_path))
    trainer = trl.KTOTrainer(str(model), args=config, train_dataset=table)
    assert sorted(trainer.train_dataset["label"]) == sorted(row["label"] for row in rows)
    trainer.train()


async def test_conversations_of_sharegpt_become_messages(tmp_path: Path) -> None:
    path, rows = await made("sharegpt", tmp_path / "run")
    for read, row in zip(loaded(path), rows, strict=True):
        messages = trl.maybe_convert_to_chatml(read)["messages"]
        entries = [{"role": entry["from"], "content": entry["value"]} for entry in row["conversations"]]
        assert [{name: message[name] for name in ("role", "content")} for message in messages] == entries
