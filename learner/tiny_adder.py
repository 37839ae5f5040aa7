"""`tiny-adder`: a small Llama that adds and subtracts, made from scratch, for runs that must fit into minutes.

It has learned three ways to answer: carefully (digit by digit, right), quickly (the same without carry or borrow) and
by guessing. Sampled as it is it answers well under half of the questions; reinforcement learning can find out that
the careful way pays.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from headway.learner.sft import Demonstration, supervised_step

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PHRASES = (
    "State the final answer to the following arithmetic problem: ",
    "carefully: ",
    "quickly: ",
    "a guess:\n",
)
"""Pieces of more than one character: the task's own wording, and how each way to answer begins."""
CHARACTERS = "0123456789+-*/=()., :;?!'\"\n" + "abcdefghijklmnopqrstuvwxyz" + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

WAYS = ("carefully", "quickly", "guess", "guess", "guess")

RECIPE: dict[str, Any] = {
    "architecture": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "initializer_range": 0.08,
        "max_position_embeddings": 512,
        "tokenizer": [*SPECIAL_TOKENS, *PHRASES, CHARACTERS],
        "seed": 0,
    },
    "warm_up": {
        "steps": 1000,
        "prompts_per_step": 16,
        "learning_rate": 3e-3,
        "dtype": "float32",  # many a CPU multiplies bfloat16 eight times as slowly
        "seed": 0,
        "answers": 1,
    },
}
"""Everything that decides what the made folder holds; raise `answers` when `worked_answer` changes."""


def make_tiny_random(folder: Path) -> None:
    """Writes architecture, tokenizer and random float32 weights (under a second)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    sizes = {key: value for key, value in RECIPE["architecture"].items() if key not in ("tokenizer", "seed")}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **sizes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RECIPE["architecture"]["seed"])
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tiny_adder(folder: Path) -> None:
    """The same after supervised learning of worked answers (a minute or two)."""
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    from headway.learner.model import PolicyModel

    make_tiny_random(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    recipe = RECIPE["warm_up"]
    model = PolicyModel(folder, dtype=recipe["dtype"])
    optimizer = torch.optim.AdamW(model.masters.values(), betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    rng = random.Random(recipe["seed"])
    for step in range(recipe["steps"]):
        warm_up, decay = (step + 1) / 20, (recipe["steps"] - step) / recipe["steps"]
        optimizer.param_groups[0]["lr"] = recipe["learning_rate"] * min(1.0, warm_up) * max(0.02, decay)
        demonstrations = [_demonstration(rng, tokenizer) for _ in range(recipe["prompts_per_step"])]
        supervised_step(model, optimizer, demonstrations, microbatch_tokens=8192)
    masters = {name: p.detach().cpu().contiguous() for name, p in model.masters.items()}
    save_file(masters, folder / "model.safetensors", metadata={"format": "pt"})


def _demonstration(rng: random.Random, tokenizer: Any) -> Demonstration:
    digits = rng.choice((1, 2))
    low, high = (0, 9) if digits == 1 else (10, 99)
    left, right, sign = rng.randint(low, high), rng.randint(low, high), rng.choice("+-")
    answers = [worked_answer(left, sign, right, way, rng) for way in WAYS]
    return Demonstration(
        tokenizer.encode(f"{PHRASES[0]}{left} {sign} {right} ="),
        [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in answers],
    )


def worked_answer(left: int, sign: str, right: int, way: str, rng: random.Random) -> str:
    """Worked steps, if any, and the answer on the last line. Both terms have one digit, or both have two.

    >>> worked_answer(47, "+", 85, "carefully", random.Random(0))
    'carefully: 7+5=12 4+8+1=13\\n132'
    """
    result = left + right if sign == "+" else left - right
    if way == "guess":
        return f"a guess:\n{rng.randint(*((-9, 18) if max(left, right) < 10 else (-89, 198)))}"
    negative = result < 0
    if negative:
        left, right = right, left
    (tens_left, ones_left), (tens_right, ones_right) = divmod(left, 10), divmod(right, 10)
    if sign == "+":
        ones = ones_left + ones_right
        carry = ones // 10
        steps = [f"{ones_left}+{ones_right}={ones}"]
    else:
        carry = int(ones_left < ones_right)
        ones = 10 * carry + ones_left - ones_right
        steps = [f"{ones_left + 10 * carry}-{ones_right}={ones}"]
    if way == "quickly":
        carry = 0
    answer = ones
    if max(left, right) > 9:
        tens = tens_left + tens_right + carry if sign == "+" else tens_left - tens_right - carry
        steps.append(f"{tens_left}{sign}{tens_right}{f'{sign}1' if carry else ''}={tens}")
        answer = 10 * tens + ones % 10
    minus = "-" if negative else ""
    return f"{way}: {f'{minus} ' if minus else ''}{' '.join(steps)}\n{minus}{answer}"


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    pieces = [(token, 0.0) for token in SPECIAL_TOKENS]
    pieces += [(phrase, -1.0) for phrase in PHRASES]
    pieces += [(character, -1.0) for character in CHARACTERS]  # the fewest pieces have the best score
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=SPECIAL_TOKENS.index("<unk>")))
    tokenizer.decoder = decoders.Fuse()
    bos = SPECIAL_TOKENS.index("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos)]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        chat_template="{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )
