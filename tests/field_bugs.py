r"""Public failures of trainers, and what each ends in here: writes docs/field-bugs.md, from the tests that show it.

    PYTHONPATH=tests python -m field_bugs

To add one: a record of TABLE, and `@pytest.mark.field_bug("key")` on a test that would fail if it could happen here.
A record is its key, its verdict, when it shows, and words of the message that the test asserts (or why it cannot
happen); then the symptom and its threads. `house/test_field_bugs.py` holds table, marks and page together.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, namedtuple
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "field-bugs.md"
VERDICTS = ("impossible", "stopped", "warned", "open")

TABLE = """
# Prompts and images
tokens-and-features | impossible | | ids and pixels are made once, by one processor, and are those of transformers
    Image features and image tokens do not match after some steps | verl #3469 #3708 #4050, EasyR1 #267
tool-image | impossible | | the learner runs the very ids of each turn, which the engine compares
    They do not match once a tool shows an image | TRL #5663 #6274 #6290, verl-agent #202, multimodal-search-r1 #20
batch-loses-images | stopped | step 1 | guard logp_gap
    One sample that disagrees takes the images of the whole batch, and training goes on | TRL 1.16 (source)
double-expansion | stopped | its first request | vLLM ran
    Image ids are expanded twice, or the engine resizes otherwise | TRL #6294 #6401, prime-rl #1739, EasyR1 #192
cut-prompt | stopped | check, or the start | more than optim.max_tokens_per_pack
    A prompt is cut through its image tokens | EasyR1 #175 #266, verl #3469
blind-rollout | stopped | before step 1; the sync after which it begins | guard logp_gap
    Either rollouts or training go without the image | prime-rl #2786, NeMo RL #4113, verl #5160, agent-lightning #559
blind-on-both-sides | stopped | step 1 | guard unread_images
    Neither side sees the image, so nothing disagrees | Agent-R1 #21
swapped-images | stopped | step 1 | guard logp_gap
    Images of a batch stand in the places of other prompts' | VLM-R1 #263
several-images | impossible | | log-probs depend on each of them; numbered tags take the numbered columns
    Of several images some are left out or change places | TRL #4169 #4488, VLM-R1 #354, data card of MMMU
mixed-batch | impossible | | the update is that of a plain loop over all rows
    A batch of rows with and without images crashes | TRL #5139, verl #3491 #3734 #7323, EasyR1 #530, slime #1535 #1559
dropped-video | impossible | | log-probs depend on every frame, on both sides
    A video has tokens, and is dropped in training or in the rollout | TRL #4144 #5373
video-times | impossible | | positions and times are those of the family's definition, on both sides
    Rollout and training place frames at other times | ms-swift #9668, vLLM #46817
one-text-two-images | impossible | | a prompt is its row
    Rows of one text are one prompt, or break shapes when they meet in a batch | TRL #3045, ms-swift 4.6 (source)
unread-tags | stopped | check, or the start, naming the tag | <ImageHere>
    <ImageHere>, <image_1> and the like stay as text beside the image | data card of MMEB-train
# Sampling
sampled-image-token | impossible | | media tokens have no probability, in every engine
    The policy samples an image token, and the next pass dies | ms-swift #9287, TRL #3847, R1-V #91, verl #7038
one-seed | stopped | step 1 | guard duplicate_completions
    A group holds every sample several times | ms-swift #3450 #7219, verl #1683 #5179
seed-again | stopped | the first answer; step 2 if it hides | was asked for
    The same completions come back at every step | ms-swift #4383 #4712
unread-seed | impossible | | each generation has a seed that follows from the run's
    The run's seed does not reach vLLM; another count of GPUs samples otherwise | TRL #7040, verl #3126 #6857
temperature | stopped | before step 1 | guard logp_gap
    The learner's log-probs leave out the temperature | TRL #3029 #4159, NeMo RL #935, ms-swift #8427
sampling-defaults | impossible | | of generation_config.json end tokens alone are read; no top_p in training
    Defaults of the model's folder bend sampling, unknown to the learner | verl #7270, NeMo RL #3497, ms-swift #8442
shifted-log-probs | stopped | before step 1 | guard logp_gap
    Log-probs of rollout and training are one token apart | ms-swift #8196
tokenized-again | stopped | the turn | changed tokens that were there before it
    A turn is tokenised again, to other ids than were sampled | SkyRL #1486, verl #6804
# The engine's weights
not-loaded | stopped | the step whose update is lost | the same to the last bit
    Rollouts come from old weights for the whole run | Unsloth #8701, TRL #3189, verl #7453
wrong-after-sleep | stopped | step 1 | guard logp_gap
    Weights are wrong after sleep, and the run goes on | TRL #4571 #5312, verl #7904
stale-part | stopped | the step whose update is lost in part | arrived changed
    Some layers keep their first weights: experts, the vision tower | SkyRL #1680
adapter-not-sent | stopped | the step whose update is lost | the same to the last bit
    LoRA adapters never reach the rollout | verl #3516 #7495
merge-drift | impossible | | the base is never written to; each merge starts from it
    Merging and unmerging in bfloat16 wears the base | TRL #6688
old-caches | stopped | step 1 | Encoder cache miss
    Image features, keys and values of older weights are used again | vLLM #44910, TRL #7198, verl #6523, NeMo RL #3648
lora-targets | stopped | the start | no linear layer
    LoRA finds one of two names and says nothing, or other layers | PEFT #40, ms-swift #2640 #6516
lora-in-the-tower | impossible | | adapters are in the language model, and with `vision` in the tower, and nowhere else
    Adapters end in a frozen tower; or the tower stays though it should learn | prime-rl #3075, LLaVA #1647
# The update
no-gradient | stopped | the end of the run | guard no_update
    Loss and gradient are 0 for thousands of steps | TRL #3452, ms-swift #7128, vlm-grpo #3 #24, QeRL #23
never-steps | stopped | step 1 | guard update_happens
    A batch of 1 with accumulation never moves the weights | ms-swift #4348
last-micro-batch | impossible | | updates over many packs and processes are those of a plain loop
    Of an accumulated gradient only the last part is applied | open-instruct #1498
accumulated-twice | impossible | | denominators are those of the whole update
    A loss that is normalised by tokens is divided by the accumulation again | ms-swift 4.6 (source)
leaked-state | stopped | step 1 | guard logp_gap
    Linear attention carries states between packed samples | ms-swift #9618 #9865
packed-positions | stopped | before step 1 | guard logp_gap
    Positions or padding of packed rows are wrong | Megatron-Bridge #1776, verl #3653, TRL #5785
prefix-without-images | impossible | | packs equal plain forwards, with images
    A shared prefix is for text, or trains without its images | NeMo RL #4008, verl 0.9 (source)
images-again | impossible | | an image is encoded once for all completions, in every pass
    Images are decoded and encoded for each completion | EasyR1 #392, ms-swift #8309, slime #2363, sglang #23271
old-log-probs | impossible | | old, reference and new passes agree
    Old and new log-probs of one policy differ by micro-batch | verl #2996 #6280
masked-to-nothing | stopped | step 20 | guard masked_share
    The mismatch correction drops every token, and nothing is learned | TRL #5312
text-rank | impossible | | each process runs the tower in each pass, with a blank image if it has none
    Ranks hang when one holds text alone | miles #2406, TRL #3934, Qwen3-VL #126 #1832, verl #7833
nan-loss | stopped | the step | lower optim
    NaN, and answers of "!!!!" | ms-swift #7112, VLM-R1 #332, Qwen3-VL #1980
collapse | warned | after 10 steps | guard entropy_collapse
    Entropy falls to nothing on wrong answers | EasyR1 #307, verl #747 #4818 #5953 #6382
# Rewards
exception-is-zero | stopped | the call | RewardError
    An exception in a reward becomes a score of 0 | NeMo RL, EasyR1, VLM-R1 (sources)
math-thread | impossible | | its timers are off; the deadline of a worker process replaces them
    math-verify's timer fails off the main thread, and every score is 0 | verl #5635 #5839
default-zero | impossible | | None is no reward and leaves the baseline
    A reward never set is 0, and idling pays; None becomes NaN | TRL #4501 #6427, OpenRLHF #1239, ms-swift #8123
form-never-seen | stopped | 20 steps and 1000 completions, or the end of the run | mm-grpo warm
    The reward of the format stays 0 because the base never says it | VLM-R1 #173 #272, R1-V #121 #159, Unsloth #2614
gold-lists | impossible | | a list that is kept as text is read as several answers
    Golds are lists in text, and no answer is right | data cards of MMMU, A-OKVQA
box-space | impossible | | boxes say their space, and every pair of spaces agrees
    Boxes of the file are compared with boxes of the resized image | VLM-R1 #320, ms-swift #3407 #3798, Qwen3-VL #1161
phantom-advantages | warned | 10 steps and 500 completions, from step 21 on | guard phantom_advantage
    Rewards of form win over the task in groups without a right answer | verl-recipe #125
flat-groups | warned | after 10 steps; `rollout.max_attempts` replaces them | guard zero_std
    Groups whose rewards are equal waste half of a batch | verl #5228 #5601, prime-rl #2762
text-alone | warned | when rewards have risen | guard sight_lost
    Rewards rise, and the model does not look | ms-swift #5331 #5531
# Runs
unknown-keys | stopped | the config | ConfigError
    A misspelt or foreign setting is ignored | Unsloth #10452
lost-order | impossible | | rows follow from seed and step; checkpoints hold groups in flight
    A resumed run draws rows again, or leaves some out | accelerate #4165, ms-swift #10050, NeMo RL #3599
no-tower | stopped | the export | differs
    A checkpoint or export misses vision weights or the processor | verl #4338 #4498 #4761, ms-swift #9187, EasyR1 #48
lora-keys | impossible | | vLLM and transformers answer as the trainer did; a part of an adapter is refused
    Serving ignores or refuses the keys of a saved LoRA | vLLM #34186, SkyRL #1785, LlamaFactory #6845
hangs | stopped | its deadline: a server, a reward, a tool, a process | timeout
    A run hangs for hours without a message | ms-swift #4906 #6274 #6962 #8506, TRL #2923 #3671, self-llm #439
out-of-memory | warned | the start; the estimate was never held against a GPU | max_tokens_per_pack
    Memory runs out without a forecast | Qwen3-VL #2026, Unsloth #2064 #4985, VLM-R1 #276
nccl | open | | sends by NCCL have deadlines, and no GPU has run them
    A transfer between learner and servers hangs on GPUs | ms-swift #6274
kernels | open | | the gap is stopped past 0.1 nats a token; its size at a GPU's kernels is not known
    Kernels in bfloat16 drift apart | NeMo RL #4243, RL-Kernel #329
published | open | | expected curves are those of recipes for CPUs
    A published number is not reproduced | slime #1160, R1-V #106 #195, EasyR1 #546, Reason-RFT #20, verl #1109
sliding-history | open | | a conversation is one sequence of tokens
    Long histories have to be cut or summed up by turn | verl #1147, ms-swift #9095, verl-agent #66
"""

HEAD = """# Failures of the field, and what each ends in here

Written by `PYTHONPATH=tests python -m field_bugs` from `tests/field_bugs.py` and the tests it names. {count} public
failures of trainers, by their threads, each as a fault put into the code or an input that brings it: {counts}.

- **impossible**: the test fails if it could happen.
- **stopped**: the run ends with a message, at the moment named; the test asserts what is quoted.
- **warned**: the run goes on.
- **open**: nothing here prevents it.
"""


Bug = namedtuple("Bug", "section key verdict when here symptom threads")


def bugs() -> list[Bug]:
    """The records of TABLE."""
    found, section = [], ""
    for block in re.split(r"\n(?! )", TABLE.strip()):
        if block.startswith("# "):
            section = block[2:]
        else:
            found.append(Bug(section, *(part.strip() for part in re.split(r" \|(?= )|\n", block))))
    return found


def tests() -> dict[str, list[str]]:
    """Tests (`file.py::name`, from `tests/` on) by the key that they are marked with."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "mark.field_bug(" in source else ():
            for mark in getattr(node, "decorator_list", ()):
                if ast.unparse(mark).startswith("pytest.mark.field_bug("):
                    for key in mark.args:
                        found.setdefault(key.value, []).append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def text() -> str:
    """The page."""
    records, marked = bugs(), tests()
    counts = Counter(bug.verdict for bug in records)
    page = HEAD.format(count=len(records), counts=", ".join(f"{counts[v]} {v}" for v in VERDICTS))
    for number, bug in enumerate(records):
        if number == 0 or records[number - 1].section != bug.section:
            page += f"\n## {bug.section}\n\n| symptom | threads | here | test |\n|---|---|---|---|\n"
        quoted = bug.here if not bug.when else re.sub(r"^(guard )?(.*)", r"\1`\2`", bug.here)
        here = f"**{bug.verdict}**{f' ({bug.when})' * bool(bug.when)}: {quoted}"
        names = ", ".join(f"`{name}`" for name in marked.get(bug.key, ())) or "none"
        symptom = re.sub(r"<\w+>", r"`\g<0>`", bug.symptom)
        page += f"| {symptom} | {bug.threads} | {here} | {names} |\n"
    return page


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
