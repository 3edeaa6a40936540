"""The demo behind `scripts/demo`: a cluster comes up, answers three prompts, and goes.

Exits with 0 only where every answer's KV cache crossed to the generation server
and nothing of it was computed twice.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.client import Client
from baton.launch.cluster import Cluster
from baton.launch.config import ClusterConfig, RouterSection
from baton.launch.interrupt import interrupts
from protos.completion import Completion
from protos.errors import BatonError
from protos.messages import FinishReason

PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Explain in two sentences why the sky is blue.",
    "Name three things that a good violin teacher does.",
)
MAX_TOKENS = 48
TIMEOUT_S = 120.0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main() -> int:
    console = Console(highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="baton-demo-"))
    config = ClusterConfig(runtime_dir=str(folder), router=RouterSection(listen="127.0.0.1:0"))
    try:
        completions = _run(config, console)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        return EXIT_INTERRUPTED
    except BatonError as error:
        console.print(f"the demo failed: {error.message}\nthe logs are in {folder}", markup=False)
        return EXIT_FAILED
    console.print()
    console.print(make_table(completions))
    faults = [
        fault for number, item in enumerate(completions, 1) for fault in _faults(number, item)
    ]
    for fault in faults:
        console.print(fault, markup=False)
    shutil.rmtree(folder, ignore_errors=True)
    return EXIT_FAILED if faults else 0


def _run(config: ClusterConfig, console: Console) -> list[Completion]:
    """Every prompt's answer; the cluster is gone when this returns or raises."""
    with interrupts() as interrupt, Cluster(config, console.print, interrupt) as cluster:
        cluster.start()
        completions = []
        with Client(cluster.address, timeout_s=TIMEOUT_S) as client:
            for prompt in PROMPTS:
                completions.append(_ask(client, prompt, console))
                if interrupt.number is not None:
                    raise KeyboardInterrupt
        cluster.check_alive()
        console.print("stopping")
    return completions


def _ask(client: Client, prompt: str, console: Console) -> Completion:
    console.print(f"\n[bold]> {prompt}[/bold]")
    with client.chat([("user", prompt)], max_tokens=MAX_TOKENS, stream=True) as stream:
        for chunk in stream:
            console.print(chunk.text, end="", markup=False, soft_wrap=True)
        completion = stream.completion()
    is_cut = completion.finish_reason is FinishReason.LENGTH
    console.print(f" (cut at {MAX_TOKENS} tokens)" if is_cut else "")
    return completion


def make_table(completions: list[Completion]) -> Table:
    """As narrow as a terminal of 80 columns."""
    table = Table(box=None, collapse_padding=True, pad_edge=False)
    table.add_column("#")
    for name in (
        "TTFT\nms",
        "mean\nITL ms",
        "prompt\ntokens",
        "cached\ntokens",
        "completion\ntokens",
        "KV\nblocks",
        "KV\nbytes",
        "recomputed\ntokens",
    ):
        table.add_column(name, justify="right")
    table.add_column("over\nUCX by")
    for number, item in enumerate(completions, 1):
        table.add_row(
            str(number),
            f"{item.timing.ttft_ms:.0f}",
            f"{item.timing.mean_itl_ms:.1f}",
            str(item.usage.prompt_tokens),
            str(item.usage.cached_tokens),
            str(item.usage.completion_tokens),
            str(item.kv.transferred_blocks),
            f"{item.kv.transferred_bytes:,}",
            str(item.kv.recomputed_tokens),
            item.kv.transport,
        )
    return table


def _faults(number: int, item: Completion) -> list[str]:
    faults = []
    if item.kv.recomputed_tokens:
        reason = item.kv.recompute_reason or "no reason was given"
        faults.append(
            f"request {number}: {item.kv.recomputed_tokens} tokens were computed twice ({reason})"
        )
    if not item.kv.transferred_bytes:
        faults.append(f"request {number}: no KV cache crossed")
    if not item.token_ids:
        faults.append(f"request {number}: no token came")
    return faults


if __name__ == "__main__":
    sys.exit(main())
