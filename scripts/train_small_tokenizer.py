"""Makes the package's own small tokenizer: ``python scripts/train_small_tokenizer.py``.

Owns the training text, which it generates from a list of words and a few shapes of code, JSON and prose; no foreign
text goes in. The result in `hermes_rl/tokens/small/` is committed, so nobody has to run this. It is a byte-level BPE:
every byte has a token, so any text comes back exactly.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from hermes_rl.tokens.tokenizer import CONTROL, MARKUP, small_tokenizer_path

VOCABULARY = 3072

_WORDS = """
the of and to in a is that for it with as was on be by at this have from or not are but what all were when
we there can an your which their said if will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over
did down only way find use may water long little very after words called just where most know get through
back much before go good new write our used me man too any day same right look think also around another
came come work three word must because does part even place well such here take why things help put years
different away again off went old number great tell men say small every found still between name should home
big give air line set own under read last never us left end along while might next sound below saw something
thought both few those always looked show large often together asked house don't world going want school
important until form food keep children feet land side without boy once animals life enough took sometimes
four head above kind began almost live page got earth need far hand high year mother light parts country
father let night following picture being study second eyes soon times story boys since white days ever paper
hard near sentence better best across during today others however sure means knew it's try told young miles
sun ways thing whole hear example heard several change answer room sea against top turned learn point city
play toward five using himself usually money seen car morning given order red door sure become ship short
half black system program computer model server request response error value result test code data file
folder path text content string list table column row key index count total sum average difference product
percent price cost dollars apples oranges bags boxes books pages minutes hours seconds weeks months speed
distance length width height area weight train ticket shirt sold bought left remaining each equal double
triple twice half quarter question reason step steps final correct wrong true false none null empty missing
valid invalid unknown expected actual found check checks checked verify confirm create created update
updated delete deleted move moved copy copied open opened close closed start started stop stopped finish
finished run runs running ran build install package version module import function class method argument
arguments parameter parameters return returns raise exception variable name type object array number integer
float boolean dictionary set tuple loop condition branch commit merge repository project directory working
current directory user users system assistant tool tools call calls called message messages conversation
turn turns task tasks goal agent environment policy reward score group rollout sandbox terminal command
commands output input process background shell script line lines search replace patch edit print exactly
careful engineer please thank thanks hello welcome sorry okay yes great perfect here's I'll I'm let's that's
customer order orders item items product products refund account email address phone payment shipping
delivery store shop inventory stock available color size blue green yellow small medium large manager
service support desk research source sources cite according article website link links https http www
example com org html json yaml csv markdown title heading paragraph section summary note notes list greeting
squares unicode template describe explain therefore because however finally first second third thus hence
suppose assume given compute calculate calculated expression equation solve solution boxed multiply divide
add subtract plus minus times times equals greater less
"""

_SHAPES = (
    'def {a}_{b}({c}: int, {d}: str = "{e}") -> str:\n    """{A} the {b}."""\n    return f"{{{c}}} {{{d}}}"\n\n',
    "class {A}{B}:\n    def __init__(self, {c}: list[str]) -> None:\n        self.{c} = {c}\n\n",
    "for {a} in range({n}):\n    if {b} == {m} and not {c}:\n        print({d}, end='')\n    else:\n        {e} += 1\n",
    "import json\nfrom pathlib import Path\n\nwith open('{a}.txt', encoding='utf-8') as {b}:\n    {c} = {b}.read()\n",
    "try:\n    {a} = {b}.{c}({d})\nexcept ValueError as error:\n    raise RuntimeError('{e}') from error\n",
    "$ ls -la {a}/\n$ cat {a}/{b}.py | grep -n '{c}' > {d}.log 2>&1 && echo $? || exit 1\n",
    "cd /home/{a}/{b} && git add -A && git commit -m '{c} {d}' && python3 -m pytest -q tests/test_{e}.py\n",
    '{{"name": "{a}", "arguments": {{"path": "{b}/{c}.txt", "content": "{d} {e}\\n{n}"}}}}\n',
    '{{"type": "function", "function": {{"name": "{a}_{b}", "description": "{C} {d}.", "parameters": '
    '{{"type": "object", "properties": {{"{e}": {{"type": "string"}}}}, "required": ["{e}"]}}}}}}\n',
    '{{"exit_code": {n}, "output": "{a} {b}", "error": null, "ok": true, "items": [{n}, {m}]}}\n',
    "{A} {b} {c} {d}, {e} {a} ({n}.{m}).\n",
    "{A}: {b} is {n}% of {m}, so {c} = {n} * {m} + {n} / {m} - {n}.\n\n",
    "{A} {b} has {n} {c} and {d} {m} of them. How many {e} are left?\n#### {n}\n",
    "The answer is \\boxed{{{n}}}.\nStep {m}: {a} the {b}; then {c}?\n",
    "## {A} {b}\n\n- **{c}**: `{d}`\n- [{e}](https://{a}.example.com/{b}?{c}={n})\n\n| {d} | {e} |\n|---|---|\n",
    '- {{{a}: {b}, {c}: [{d}, {e}]}}\n{a}:\n  {b}: {n}\n  {c}: "{{{{ {d} }}}}"\n',
    "user\nsystem\nassistant\ntool\nYou are a {a} {b}. {C} the {d} and {e} it!\n",
)


def training_text(seed: int = 0, lines: int = 20_000) -> Iterator[str]:
    """The text, the same on every machine; words that stand earlier in the list come more often."""
    vocabulary = _WORDS.split()
    chance = random.Random(seed)
    weights = [1 / (rank + 20) for rank in range(len(vocabulary))]
    names = [word for word in vocabulary if word.isalpha()]
    for _ in range(lines):
        yield " ".join(chance.choices(vocabulary, weights, k=12)).capitalize() + ". "
        yield _fill(chance.choice(_SHAPES), chance, names)


def _fill(shape: str, chance: random.Random, names: list[str]) -> str:
    drawn = dict(zip("abcde", chance.choices(names, k=5), strict=True))
    titles = {letter.upper(): name.capitalize() for letter, name in drawn.items()}
    return shape.format(**drawn, **titles, n=chance.randrange(100), m=chance.randrange(1000))


def train(folder: Path) -> None:
    """Train and write `tokenizer.json` and `tokenizer_config.json`; the chat template is written by hand."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    word_pattern = Regex(
        r"'\w{1,2}\b|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(word_pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROL) - len(MARKUP),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKUP])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(), indent=2) + "\n", encoding="utf-8")


def _config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
    }


if __name__ == "__main__":
    train(small_tokenizer_path())
