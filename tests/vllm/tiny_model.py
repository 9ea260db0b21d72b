"""A model for tests that needs no download: two Llama layers with random weights, and a BPE tokenizer of its own.

Run by the interpreter of vLLM's environment (``python tiny_model.py FOLDER``), because transformers and tokenizers live
there. Weights are drawn wide (``initializer_range`` 0.12): with the usual 0.02 the text repeats one token, and a KV
cache that was mixed up would not show in it.
"""

import sys
from pathlib import Path

CORPUS = (
    "the engine keeps keys and values of every token it has read",
    "a block of memory moves while nobody looks and its table follows",
    "sessions leave for host memory and come back before they are asked",
    "the guard says no when a page would not fit the card any more",
    "tides rise and fall and the gate lets through what the harbour can hold",
)
VOCABULARY = 512


def build(folder: Path, seed: int = 7) -> None:
    """Write config, weights and tokenizer into ``folder``: 1 MiB, the same bytes for the same seed."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        initializer_range=0.12,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
